"""Ops ``rms_norm`` and ``gated_rms_norm``: root-mean-square normalisation, in all the variants that models use."""

from __future__ import annotations

from twinkle.kernel.ops.backends import ON_LIGER, ON_NPU, ON_TRITON, TORCH, TRITON, backend
from twinkle.kernel.registry import register_op

_HERE = "twinkle.kernel.ops.rms_norm"

register_op(
    "rms_norm",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": backend(f"{_HERE}.npu", accepts=ON_NPU),
        "triton": backend(f"{_HERE}.triton", available=TRITON, accepts=ON_TRITON),
        "liger": backend(f"{_HERE}.liger", accepts=ON_LIGER),
        "torch": backend(f"{_HERE}.torch", available=TORCH),
    },
)

register_op(
    "gated_rms_norm",
    reference=f"{_HERE}.gated_reference",
    implementations={
        "npu": backend(f"{_HERE}.npu", load="load_gated", accepts=ON_NPU),
        "triton": backend(f"{_HERE}.triton", load="load_gated", available=TRITON, accepts=ON_TRITON),
        "torch": backend(f"{_HERE}.torch", load="load_gated", available=TORCH, accepts="accepts_gated"),
    },
)
