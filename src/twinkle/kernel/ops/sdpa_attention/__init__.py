"""Op ``sdpa_attention``: the function behind ``attn_implementation="sdpa"`` of transformers, process-wide."""

from __future__ import annotations

from twinkle.kernel.ops.backends import ON_NPU, TORCH, backend
from twinkle.kernel.registry import lazy_import, register_op

_HERE = "twinkle.kernel.ops.sdpa_attention"

register_op(
    "sdpa_attention",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": backend(f"{_HERE}.npu", accepts=ON_NPU),
        "torch": backend(f"{_HERE}.torch", available=TORCH, accepts=None),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    concerns=lazy_import(f"{_HERE}.installer:uses_sdpa"),
)
