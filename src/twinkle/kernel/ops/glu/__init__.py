"""Ops ``swiglu`` and ``geglu``: gated MLPs (Shazeer, 2020, arXiv:2002.05202) whose activation and product are fused."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.glu"
_LIGER = lazy_import("twinkle.kernel.ops.liger_support:available")

register_op(
    "swiglu",
    reference=f"{_HERE}.reference:SWIGLU",
    implementations={
        "liger": KernelImpl(lazy_import(f"{_HERE}.liger:load"), _LIGER, lazy_import(f"{_HERE}.liger:accepts")),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"),
            lazy_import(f"{_HERE}.torch:available"),
            lazy_import(f"{_HERE}.torch:accepts"),
        ),
    },
)

register_op(
    "geglu",
    reference=f"{_HERE}.reference:GEGLU",
    implementations={
        "liger": KernelImpl(lazy_import(f"{_HERE}.liger:load"), _LIGER, lazy_import(f"{_HERE}.liger:accepts")),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"),
            lazy_import(f"{_HERE}.torch:available"),
            lazy_import(f"{_HERE}.torch:accepts"),
        ),
    },
)
