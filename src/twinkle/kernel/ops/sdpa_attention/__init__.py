"""Op ``sdpa_attention``: the function behind ``attn_implementation="sdpa"`` of transformers, process-wide."""

from __future__ import annotations

from twinkle.kernel.registry import lazy_import, register_op

register_op(
    "sdpa_attention", implementations={}, installer=lazy_import("twinkle.kernel.ops.sdpa_attention.installer:install")
)
