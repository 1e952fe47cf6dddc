"""What ``scaled_dot_product_attention`` computes."""

from __future__ import annotations

import math

import torch


def scaled_dot_product_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query · keyᵀ · scale + mask) · value on the CPU, query by query.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads, keys, width); with ``enable_gqa`` the heads of the query are a multiple of these.
        value: (batch, heads, keys, width of the result).
        attn_mask: broadcast to (batch, heads, queries, keys); of bool, what is seen; else added to the scores.
        dropout_p: 0.
        is_causal: a query sees the keys up to its own number.
        scale: 1 / √width when left out.

    Returns:
        (batch, heads, queries, width of the result); zeros for a query that sees nothing.
    """
    batch, heads, queries, width = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    result = torch.zeros(batch, heads, queries, value.shape[3], dtype=query.dtype)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    bias = torch.zeros((), dtype=query.dtype)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = attn_mask
    elif attn_mask is not None:
        bias = attn_mask
        seen = bias > -math.inf
    seen, bias = seen.expand(batch, heads, queries, keys), bias.expand(batch, heads, queries, keys)
    for b, h, q in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        chosen = seen[b, h, q].nonzero()[:, 0]
        if len(chosen):
            scores = (
                key[b, h // group, chosen] @ query[b, h, q] * (scale or 1 / math.sqrt(width)) + bias[b, h, q, chosen]
            )
            weights = (scores - scores.max()).exp()
            result[b, h, q] = weights / weights.sum() @ value[b, h // group, chosen]
    return result
