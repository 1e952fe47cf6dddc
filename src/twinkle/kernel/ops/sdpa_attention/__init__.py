"""Op ``sdpa_attention``: the function behind ``attn_implementation="sdpa"`` of transformers, process-wide."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.sdpa_attention"

register_op(
    "sdpa_attention",
    reference=f"{_HERE}.reference",
    implementations={
        "npu": KernelImpl(
            lazy_import(f"{_HERE}.npu:load"),
            lazy_import(f"{_HERE}.npu:available"),
            lazy_import(f"{_HERE}.npu:accepts"),
        ),
        "torch": KernelImpl(
            lazy_import(f"{_HERE}.torch:load"), lazy_import("twinkle.kernel.ops.torch_support:available")
        ),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    concerns=lazy_import(f"{_HERE}.installer:uses_sdpa"),
)
