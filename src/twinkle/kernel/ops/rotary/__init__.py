"""Ops ``rotary`` and ``multimodal_rotary``: rotary position embedding of attention's queries and keys."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.rotary"
_NPU = lazy_import(f"{_HERE}.npu:available")
_LIGER = lazy_import(f"{_HERE}.liger:available")

register_op(
    "rotary",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": KernelImpl(lazy_import(f"{_HERE}.npu:load"), _NPU, lazy_import(f"{_HERE}.npu:accepts")),
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.triton:load"),
            lazy_import("twinkle.kernel.ops.triton_support:available"),
            lazy_import(f"{_HERE}.triton:accepts"),
        ),
        "liger": KernelImpl(lazy_import(f"{_HERE}.liger:load"), _LIGER, lazy_import(f"{_HERE}.liger:accepts")),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"),
            lazy_import("twinkle.kernel.ops.torch_support:available"),
            lazy_import(f"{_HERE}.torch:accepts"),
        ),
    },
)

register_op(
    "multimodal_rotary",
    reference=f"{_HERE}.multimodal_reference",
    implementations={
        "npu": KernelImpl(lazy_import(f"{_HERE}.npu:load_multimodal"), _NPU, lazy_import(f"{_HERE}.npu:accepts")),
    },
)
