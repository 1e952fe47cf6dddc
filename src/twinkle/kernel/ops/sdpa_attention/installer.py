"""Puts an attention function into transformers' registry under the key ``sdpa``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle.kernel.undo import patch

if TYPE_CHECKING:
    from torch import nn


def install(model: nn.Module, target: Any, impl: Any) -> int:
    """Registers ``impl`` for the whole process.

    Returns:
        how many attention layers of this model look the function up there; nothing is registered for a model with none.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = sum(_uses_sdpa(module) for module in model.modules())
    if layers:
        patch(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", impl)
        if "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping:
            patch(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", impl)
    return layers


def _uses_sdpa(module: nn.Module) -> bool:
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention and getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
