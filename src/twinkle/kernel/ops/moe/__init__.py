"""Ops ``moe_router``, ``moe_experts`` (all experts of a layer) and ``moe_block`` (both, and a shared expert)."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.moe"

register_op(
    "moe_experts",
    reference=f"{_HERE}.experts_reference",
    implementations={
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load"),
            lazy_import(f"{_HERE}.npu:available"),
            lazy_import(f"{_HERE}.npu:accepts"),
        ),
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.triton:load"),
            lazy_import("twinkle.kernel.ops.triton_support:available"),
            lazy_import(f"{_HERE}.triton:accepts"),
        ),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"),
            lazy_import("twinkle.kernel.ops.torch_support:available"),
            lazy_import(f"{_HERE}.torch:accepts"),
        ),
        "liger": KernelImpl(
            lazy_import(f"{_HERE}.liger:load"),
            lazy_import(f"{_HERE}.liger:available"),
            lazy_import(f"{_HERE}.liger:accepts"),
        ),
    },
)

register_op(
    "moe_router",
    reference=f"{_HERE}.router_reference",
    implementations={
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.triton_router:load"),
            lazy_import("twinkle.kernel.ops.triton_support:available"),
            lazy_import(f"{_HERE}.triton_router:accepts"),
        ),
    },
)

register_op(
    "moe_block",
    reference=f"{_HERE}.block_reference",
    implementations={
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load_block"),
            lazy_import(f"{_HERE}.npu:available_block"),
            lazy_import(f"{_HERE}.npu:accepts_block"),
        ),
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.triton_block:load"),
            lazy_import("twinkle.kernel.ops.triton_support:available"),
            lazy_import(f"{_HERE}.triton_block:accepts"),
        ),
    },
)
