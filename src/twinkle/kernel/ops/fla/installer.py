"""Rebinds the linear-attention functions in the Python modules that define a model's gated delta-net layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.reclass import peel
from twinkle.kernel.undo import patch

if TYPE_CHECKING:
    from torch import nn


def install(model: nn.Module, target: Any, impl: Mapping[str, Callable[..., Any]]) -> int:
    """Installs functions by name, for the whole process.

    Args:
        impl: function name in the modeling file (e.g. ``torch_chunk_gated_delta_rule``) -> replacement.

    Returns:
        how many gated delta-net layers of this model call them.
    """
    layers = [peel(type(m)) for m in model.modules() if peel(type(m)).__name__.endswith("GatedDeltaNet")]
    for name in {cls.__module__ for cls in layers}:
        for function, replacement in impl.items():
            if function in vars(sys.modules[name]):
                patch(sys.modules[name], function, replacement)
    return len(layers)
