"""Ops ``rotary`` and ``multimodal_rotary``: rotary position embedding of attention's queries and keys."""

from __future__ import annotations

from twinkle.kernel.ops.backends import ON_NPU, ON_TRITON, TORCH, TRITON, backend
from twinkle.kernel.registry import register_op

_HERE = "twinkle.kernel.ops.rotary"

register_op(
    "rotary",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": backend(f"{_HERE}.npu", accepts=ON_NPU),
        "triton": backend(f"{_HERE}.triton", available=TRITON, accepts=ON_TRITON),
        "liger": backend(f"{_HERE}.liger"),
        "torch": backend(f"{_HERE}.torch", available=TORCH),
    },
)

register_op(
    "multimodal_rotary",
    reference=f"{_HERE}.multimodal_reference",
    implementations={"npu": backend(f"{_HERE}.npu", load="load_multimodal", accepts=ON_NPU)},
)
