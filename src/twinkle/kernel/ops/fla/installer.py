"""Rebinds the linear-attention functions in the Python modules that define a model's gated delta-net layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.calls import Router
from twinkle.kernel.journal import patch_of
from twinkle.kernel.reclass import peel
from twinkle.kernel.undo import active_transaction, patch

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
            patch(home, function, _function_for(home, function, impl[function]))
        rebound[name] = len(names)
    return sum(rebound[name] > 0 for name in layers)


def _function_for(home: Any, name: str, kernel: Callable[..., Any]) -> Any:
    """What counts and decides call by call in front of a kernel; the one that is there where it serves the same."""
    current = active_transaction()
    assert current is not None and current.row is not None
    row = current.row
    served_by = (row.op, row.backend)
    there = patch_of(home, name)
    router = getattr(there.value, "twinkle_router", None) if there else None
    if there is not None and router is not None and router.served_by == served_by:
        row.counts = router.counts  # of all functions together
        return there.value
    router = Router(name, vars(home)[name], served_by)
    router.counts = row.counts
    return router.around(kernel, getattr(kernel, "accepts_call", None), None)
