"""Puts an attention function into transformers' registry under the key ``sdpa``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.install import patch_function

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
        patch_function(place, KEY, impl)
    return layers


def uses_sdpa(module: nn.Module) -> bool:
    """Whether a module is an attention layer that looks its function up under the key."""
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and getattr(getattr(module, "config", None), "_attn_implementation", None) == KEY
