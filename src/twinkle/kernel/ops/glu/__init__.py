"""Ops ``swiglu`` and ``geglu``: gated MLPs (Shazeer, 2020, arXiv:2002.05202) whose activation and product are fused."""

from __future__ import annotations

from twinkle.kernel.ops.backends import ON_NPU, ON_TRITON, TRITON, backend
from twinkle.kernel.registry import register_op

_HERE = "twinkle.kernel.ops.glu"
_TRITON = backend(f"{_HERE}.triton", available=TRITON, accepts=ON_TRITON)

# No torch backend: PyTorch has no fused kernel for the product, and its operators can't be arranged to win. The best
# arrangement, an autograd.Function that works in place where it may, took 14.7 ms where the original's
# silu(gate) * up takes 14.9 (2048x3072, fp32, forward and backward, one CPU thread; bf16: 12.7 and 12.1); with the
# activation computed again in the backward, which would save its memory, 15.4 (bf16: 15.2).

register_op(
    "swiglu",
    reference=f"{_HERE}.reference:SWIGLU",
    implementations={
        "npu": backend(f"{_HERE}.npu", available="available_silu", accepts=ON_NPU),
        "triton": _TRITON,
        "liger": backend(f"{_HERE}.liger", available="available_silu"),
    },
)

register_op(
    "geglu",
    reference=f"{_HERE}.reference:GEGLU",
    implementations={
        "npu": backend(f"{_HERE}.npu", available="available_gelu", accepts=ON_NPU),
        "triton": _TRITON,
        "liger": backend(f"{_HERE}.liger", available="available_gelu"),
    },
)
