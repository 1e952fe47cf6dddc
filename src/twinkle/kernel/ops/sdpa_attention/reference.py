"""Attention (Vaswani et al., 2017, arXiv:1706.03762) as transformers' layers call it.

What a backend gives is a function with the signature of :func:`original`. It may carry
``accepts_call(*same arguments) -> str | None``: a reason leaves a call to what was there before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.ops.sdpa_attention.inputs import additive, inputs_of, repeated
from twinkle.kernel.probe import random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"

VARIANT = "attention"
"""The only one: masks, groups and scale are arguments."""


def original(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``softmax(scale q k^T + mask) v``, written out.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: ``[B, N, Sq, D]``.
        key, value: ``[B, N / groups, Sk, D]``.
        attention_mask: 4-D; boolean (True keeps) or added to the scores.
        dropout: the share of attention weights that is dropped.
        scaling: ``D ** -0.5`` when None.
        position_bias: added to the scores.
        compute_dtype: of the softmax.

    Returns:
        ``[B, Sq, N, D]`` contiguous, and None in the place of the attention weights.
    """
    given = inputs_of(module, query, key, value, attention_mask, scaling, is_causal, position_bias)
    scores = given.query @ repeated(given.key, given.groups).transpose(2, 3) * given.scale
    mask = given.mask
    if given.causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores + additive(mask, scores.dtype)
    weights = scores.softmax(-1, dtype=compute_dtype).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ repeated(given.value, given.groups)).transpose(1, 2).contiguous(), None


def probe(site: Site) -> str | Reason:
    """All layers call it alike, and the installer finds them."""
    return VARIANT if site.original is original else Reason("variant", "only an installer finds a model's attention")


def build(variant: str, compute_dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """The maths itself."""

    @functools.wraps(original)  # whoever installs it compares signatures
    def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return original(*args, **kwargs, compute_dtype=compute_dtype)  # type: ignore[misc]

    return attention


def example(site: Site, variant: str) -> Example:
    """Two heads of queries for each of keys, causal."""
    query = random_tensor(2, 4, 7, 16, seed=1)
    key, value = random_tensor(2, 2, 7, 16, seed=2), random_tensor(2, 2, 7, 16, seed=3)
    return Example(None, (types.SimpleNamespace(is_causal=True), query, key, value, None))
