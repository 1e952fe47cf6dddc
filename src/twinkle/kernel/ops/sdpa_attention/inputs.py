"""How transformers' attention layers call their attention function: what a call means, and which ones nobody serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

UNSERVED = {
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "head_mask": "a mask of heads",
    "output_attentions": "the attention weights are wanted",
}
"""Keyword arguments that change the result, where they are given -> why the call is left to the original."""


class Inputs(NamedTuple):
    """What is left to compute: ``softmax(scale q k^T + mask) v``.

    Attributes:
        query: ``[B, N, Sq, D]``.
        key, value: ``[B, N or fewer, Sk, D]``; several heads of queries share one of theirs.
        mask: 4-D, spreads over ``[B, N, Sq, Sk]``; boolean, where True keeps, or added to the scores; or None.
        causal: query i sees the keys up to i; only without a mask.
        scale: of the scores.
        shared: the mask is the one that all layers are given.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float
    shared: bool = True

    @property
    def groups(self) -> int:
        """Heads of queries for each head of keys."""
        return self.query.shape[1] // self.key.shape[1]


def inputs_of(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: torch.Tensor | None,
) -> Inputs:
    """A call's inputs by transformers' rules.

    The argument ``is_causal`` decides, else the module's attribute; and only where several queries come without a mask.
    A sliding window is in the mask already.
    """
    length, keys = query.shape[2], key.shape[2]
    given = attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(length > 1 and attention_mask is None and causal)
    if causal and keys > length:  # an empty static cache: what lies behind the queries isn't written yet
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    elif attention_mask is not None and attention_mask.shape[-1] > keys:
        attention_mask = attention_mask[..., :keys]
    if position_bias is not None:
        lowest = torch.finfo(query.dtype).min
        if causal:
            attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.dtype == torch.bool:
            attention_mask = torch.where(attention_mask, position_bias, lowest)
        else:
            attention_mask = position_bias + attention_mask
        causal = False
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Inputs(query, key, value, attention_mask, causal, scale, shared=attention_mask is given)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores of a dtype: the lowest number of that and its own where nothing is kept."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
    return mask.clamp(min=max(lowest, torch.finfo(mask.dtype).min)).to(dtype)


def without_empty_rows(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of scores of a dtype with all keys for rows that have none, and ``[..., Sq, 1]``, which rows those are.

    In transformers' eager attention such a row is the mean of all values (:func:`with_means`). Fused kernels make
    it zero or NaN; and where it is right, as PyTorch's on a CPU for an additive mask, its gradients are too large by
    the number of keys: the logarithm of that is lost beside the lowest number. Eager attention has gradients for query
    and keys of such a row as well, of which its result doesn't depend; here it has none.
    """
    if mask.dtype == torch.bool:
        empty = ~mask.any(-1, keepdim=True)
        return mask | empty, empty
    empty = mask.amax(-1, keepdim=True) <= torch.finfo(dtype).min / 2
    return mask.masked_fill(empty, 0), empty


def with_means(out: torch.Tensor, empty: torch.Tensor | None, given: Inputs) -> torch.Tensor:
    """A result with the mean of all values in the rows that have no key, in its own dtype: autocast's, should it be on.

    Args:
        out: ``[B, N, Sq, D]``.
        empty: ``[..., Sq, 1]``, which rows those are; None for none.
    """
    if empty is None:
        return out
    return torch.where(empty, repeated(given.value.mean(2, keepdim=True), given.groups).to(out.dtype), out)


def repeated(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values with a head for each head of queries."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def call_reason(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Any
) -> str | None:
    """Why no kernel serves a call."""
    for name, why in UNSERVED.items():
        given = options.get(name)
        if given is not None and given is not False:
            return why
    if query.dim() != 4 or key.dim() != 4 or query.shape[1] % key.shape[1]:
        return "queries and keys of [batch, heads, length, channels] only"
    if mask is not None and mask.dim() != 4:
        return "a mask that doesn't have four dimensions"
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        return "a mask that is neither boolean nor added to the scores"
    return None


def function_of(attend: Callable[[Inputs, float], torch.Tensor], reason: Callable[..., str | None], name: str) -> Any:
    """What a backend loads: a function with the signature of transformers', and its ``accepts_call``.

    Args:
        attend: of a call's inputs and the share of weights that is dropped, ``[B, N, Sq, Dv]``.
        reason: ``reason(query, key, value, mask, options)`` -> why the call can't be served, or None.
        name: the function's ``__name__``.
    """

    def attention(  # type: ignore[no-untyped-def]
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=None,
        is_causal=None,
        position_bias=None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        given = inputs_of(module, query, key, value, attention_mask, scaling, is_causal, position_bias)
        return attend(given, dropout).transpose(1, 2).contiguous(), None

    def accepts_call(module, query, key, value, attention_mask, *args, **kwargs) -> str | None:  # type: ignore[no-untyped-def]
        return reason(query, key, value, attention_mask, kwargs)

    attention.__name__ = attention.__qualname__ = name
    attention.accepts_call = accepts_call  # type: ignore[attr-defined]
    return attention
