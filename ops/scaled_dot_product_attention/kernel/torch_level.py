"""``scaled_dot_product_attention`` by other operators of PyTorch, and its gradient."""

from __future__ import annotations

import math

import torch


def scaled_dot_product_attention_torch(
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
    """See ``aten::scaled_dot_product_attention``. Half precision is computed in float32."""
    wide, heads, half = _wide(query.dtype), query.shape[1], _half_scale(query, scale)
    weights = _weights(query.to(wide) * half, _repeated(key, heads).to(wide) * half, attn_mask, is_causal)
    return (weights @ _repeated(value, heads).to(wide)).to(query.dtype)


def scaled_dot_product_attention_pullback(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of query, key, value and a mask that is added, in float32 or float64, from the weights once more.

    With P the weights and S the scores: dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P∘(dP - rowsum(dP∘P)), dQ = dS·K·scale,
    dK = dSᵀ·Q·scale. See "Online normalizer calculation for softmax", arXiv:1805.02867, for the forward kernel.
    """
    wide, heads, half = _wide(query.dtype), query.shape[1], _half_scale(query, scale)
    q, k = query.to(wide) * half, _repeated(key, heads).to(wide) * half
    v, g = _repeated(value, heads).to(wide), grad.to(wide)
    weights = _weights(q, k, attn_mask, is_causal)
    of_weights = g @ v.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = of_scores @ k * half
    of_key = _summed(of_scores.transpose(-1, -2) @ q * half, key.shape[1])
    of_value = _summed(weights.transpose(-1, -2) @ g, value.shape[1])
    of_mask = None
    if attn_mask is not None and attn_mask.requires_grad:
        of_mask = of_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_mask


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _half_scale(query: torch.Tensor, scale: float | None) -> float:
    """The root of the scale: query and key get one each, so that no product overflows that needn't."""
    return math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A key or value head for every query head."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _summed(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """What :func:`_repeated` has repeated, added."""
    batch, many, *rest = grad.shape
    return grad if many == heads else grad.reshape(batch, heads, many // heads, *rest).sum(2)


def _weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """(batch, heads, queries, keys): the softmax of the scores; zeros for a query that sees nothing."""
    scores = query @ key.transpose(-1, -2)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
