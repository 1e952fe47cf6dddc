"""Ops ``rms_norm`` and ``gated_rms_norm``: root-mean-square normalisation, in all the variants that models use."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.rms_norm"
_NPU = lazy_import(f"{_HERE}.npu:available")
_LIGER = lazy_import(f"{_HERE}.liger:available")
_TRITON = lazy_import("twinkle.kernel.ops.triton_support:available")
_TORCH = lazy_import("twinkle.kernel.ops.torch_support:available")

register_op(
    "rms_norm",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": KernelImpl(lazy_import(f"{_HERE}.npu:load"), _NPU, lazy_import(f"{_HERE}.npu:accepts")),
        "triton": KernelImpl(lazy_import(f"{_HERE}.triton:load"), _TRITON, lazy_import(f"{_HERE}.triton:accepts")),
        "liger": KernelImpl(lazy_import(f"{_HERE}.liger:load"), _LIGER, lazy_import(f"{_HERE}.liger:accepts")),
        "torch": KernelImpl(lazy_import(f"{_HERE}.torch:load"), _TORCH, lazy_import(f"{_HERE}.torch:accepts")),
    },
)

register_op(
    "gated_rms_norm",
    reference=f"{_HERE}.gated_reference",
    implementations={
        "npu": KernelImpl(lazy_import(f"{_HERE}.npu:load_gated"), _NPU, lazy_import(f"{_HERE}.npu:accepts")),
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.triton:load_gated"), _TRITON, lazy_import(f"{_HERE}.triton:accepts")
        ),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load_gated"), _TORCH, lazy_import(f"{_HERE}.torch:accepts_gated")
        ),
    },
)
