"""Puts an attention function into transformers' registry under the key ``sdpa``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.calls import Router
from twinkle.kernel.journal import patch_of
from twinkle.kernel.undo import active_transaction, patch

if TYPE_CHECKING:
    from torch import nn

KEY = "sdpa"


def install(model: nn.Module, target: Any, impl: Any) -> int:
    """Registers ``impl`` for the whole process, in both places where transformers looks.

    Calls that it doesn't take go to the function that was there.

    Returns:
        how many attention layers of this model look the function up there; nothing is registered for a model with none.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = sum(uses_sdpa(module) for module in model.modules())
    places: list[MutableMapping[str, Any]] = [type(ALL_ATTENTION_FUNCTIONS)._global_mapping]
    if KEY in ALL_ATTENTION_FUNCTIONS._local_mapping:
        places.append(ALL_ATTENTION_FUNCTIONS._local_mapping)
    for place in places if layers else ():
        patch(place, KEY, _function_for(place, impl))
    return layers


def _function_for(place: MutableMapping[str, Any], impl: Any) -> Any:
    """What counts and decides call by call in front of ``impl``; the one that is there where it serves the same."""
    current = active_transaction()
    assert current is not None and current.row is not None
    row = current.row
    served_by = (row.op, row.backend)
    there = patch_of(place, KEY)
    router = getattr(there.value, "twinkle_router", None) if there else None
    if there is not None and router is not None and router.served_by == served_by:
        row.counts = router.counts
        return there.value
    router = Router(KEY, place[KEY], served_by)
    router.counts = row.counts  # of both places together
    return router.around(impl, getattr(impl, "accepts_call", None), None)


def uses_sdpa(module: nn.Module) -> bool:
    """Whether a module is an attention layer that looks its function up under the key."""
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and getattr(getattr(module, "config", None), "_attn_implementation", None) == KEY
