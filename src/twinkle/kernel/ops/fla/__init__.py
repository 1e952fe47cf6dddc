"""Op ``fla``: the linear-attention functions of gated delta-net layers, process-wide."""

from __future__ import annotations

from twinkle.kernel.ops.backends import TORCH, backend
from twinkle.kernel.registry import lazy_import, register_op

_HERE = "twinkle.kernel.ops.fla"

register_op(
    "fla",
    implementations={
        "fla": backend(f"{_HERE}.library"),
        "npu": backend(f"{_HERE}.npu"),
        "torch": backend(f"{_HERE}.torch", available=TORCH, accepts=None),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    concerns=lazy_import(f"{_HERE}.installer:is_gated_delta_net"),
)
