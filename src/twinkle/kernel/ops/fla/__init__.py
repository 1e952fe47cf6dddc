"""Op ``fla``: the linear-attention functions of gated delta-net layers, process-wide."""

from __future__ import annotations

from twinkle.kernel.registry import lazy_import, register_op

register_op("fla", implementations={}, installer=lazy_import("twinkle.kernel.ops.fla.installer:install"))
