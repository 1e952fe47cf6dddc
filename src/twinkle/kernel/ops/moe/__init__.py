"""Ops ``moe_router``, ``moe_experts`` (all experts of a layer) and ``moe_block`` (both, and a shared expert)."""

from __future__ import annotations

from twinkle.kernel.ops.backends import TORCH, TRITON, backend
from twinkle.kernel.registry import register_op

_HERE = "twinkle.kernel.ops.moe"

register_op(
    "moe_router",
    reference=f"{_HERE}.router_reference",
    implementations={"triton": backend(f"{_HERE}.triton_router", available=TRITON)},
)

register_op(
    "moe_experts",
    reference=f"{_HERE}.experts_reference",
    implementations={
        "npu": backend(f"{_HERE}.npu"),
        "triton": backend(f"{_HERE}.triton", available=TRITON),
        "torch": backend(f"{_HERE}.torch", available=TORCH),
        "liger": backend(f"{_HERE}.liger"),
    },
)

register_op(
    "moe_block",
    reference=f"{_HERE}.block_reference",
    implementations={
        "npu": backend(f"{_HERE}.npu", load="load_block", available="available_block", accepts="accepts_block"),
        "triton": backend(f"{_HERE}.triton_block", available=TRITON),
    },
)
