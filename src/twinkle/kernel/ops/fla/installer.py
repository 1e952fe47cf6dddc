"""Rebinds the linear-attention functions in the Python modules that define a model's gated delta-net layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.install import patch_function
from twinkle.kernel.reclass import peel

if TYPE_CHECKING:
    from torch import nn


def is_gated_delta_net(module: nn.Module) -> bool:
    """By the name that every family gives such a layer."""
    return peel(type(module)).__name__.endswith("GatedDeltaNet")


def install(model: nn.Module, target: Any, impl: Mapping[str, Callable[..., Any]]) -> int:
    """Installs functions by name, for the whole process.

    Calls that one doesn't take go to the function that was there.

    Args:
        impl: function name in the modeling file (e.g. ``torch_chunk_gated_delta_rule``) -> replacement.

    Returns:
        how many gated delta-net layers of this model call at least one of them.
    """
    layers = [peel(type(module)).__module__ for module in model.modules() if is_gated_delta_net(module)]
    rebound: dict[str, int] = {}
    for name in dict.fromkeys(layers):
        home = sys.modules[name]
        names = [function for function in impl if function in vars(home)]
        for function in names:
            patch_function(home, function, impl[function])
        rebound[name] = len(names)
    return sum(rebound[name] > 0 for name in layers)
