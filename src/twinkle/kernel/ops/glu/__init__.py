"""Ops ``swiglu`` and ``geglu``: gated MLPs (Shazeer, 2020, arXiv:2002.05202) whose activation and product are fused."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.glu"
_TRITON = KernelImpl(
    lazy_import(f"{_HERE}.triton:load"),
    lazy_import("twinkle.kernel.ops.triton_support:available"),
    lazy_import(f"{_HERE}.triton:accepts"),
)

# No torch backend: PyTorch has no fused kernel for the product, and its operators can't be arranged to win. The best
# arrangement, an autograd.Function that works in place where it may, took 14.7 ms where the original's
# silu(gate) * up takes 14.9 (2048x3072, fp32, forward and backward, one CPU thread; bf16: 12.7 and 12.1); with the
# activation computed again in the backward, which would save its memory, 15.4 (bf16: 15.2).

register_op(
    "swiglu",
    reference=f"{_HERE}.reference:SWIGLU",
    implementations={
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load"),
            lazy_import(f"{_HERE}.npu:available_silu"),
            lazy_import(f"{_HERE}.npu:accepts"),
        ),
        "triton": _TRITON,
        "liger": KernelImpl(
            lazy_import(f"{_HERE}.liger:load"),
            lazy_import(f"{_HERE}.liger:available_silu"),
            lazy_import(f"{_HERE}.liger:accepts"),
        ),
    },
)

register_op(
    "geglu",
    reference=f"{_HERE}.reference:GEGLU",
    implementations={
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load"),
            lazy_import(f"{_HERE}.npu:available_gelu"),
            lazy_import(f"{_HERE}.npu:accepts"),
        ),
        "triton": _TRITON,
        "liger": KernelImpl(
            lazy_import(f"{_HERE}.liger:load"),
            lazy_import(f"{_HERE}.liger:available_gelu"),
            lazy_import(f"{_HERE}.liger:accepts"),
        ),
    },
)
