"""The ``npu`` backend of ``sdpa_attention``: ``npu_fusion_attention`` and its published gradient.

A boolean mask goes where torch_npu takes what is masked, a graded one is added to the scores (its ``pse``), a causal
one is a mode with a mask of a fixed size. Heads of keys are shared without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.npu_support import call_reason as tensors_reason
from twinkle.kernel.ops.npu_support import npu_function
from twinkle.kernel.ops.sdpa_attention.inputs import (
    Inputs,
    additive,
    call_reason,
    function_of,
    with_means,
    without_empty_rows,
)
from twinkle.kernel.ops.sdpa_attention.reference import original
from twinkle.kernel.probe import random_tensor

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

_OPTIONS = ("pse", "atten_mask", "keep_prob", "sparse_mode")
_SOFTMAX = ("softmax_max", "softmax_sum", "softmax_in", "attention_in", "seed", "offset", "numels")
available = functools.partial(
    npu_support.available,
    {
        "npu_fusion_attention": (*_OPTIONS, "scale"),
        "npu_fusion_attention_grad": (*_OPTIONS, *_SOFTMAX, "scale_value"),
    },
)

MOST_HEADS = 256
WIDEST = 512

PLAIN, CAUSAL = 0, 2
"""Modes of a mask: as it is given; queries see the keys up to their own, of which the mask is a pattern."""
PATTERN = 2048
"""The pattern's size, whatever the lengths."""


@functools.cache
def _pattern(device: torch.device) -> torch.Tensor:
    return torch.ones(PATTERN, PATTERN, dtype=torch.bool, device=device).triu(1)


class _Attention(torch.autograd.Function):
    """``[B, N, Sq, D]`` from query, key, value and what is added to the scores, all contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        masked: torch.Tensor | None,
        scale: float,
        keep: float,
        mode: int,
    ) -> torch.Tensor:
        options = {"pse": bias, "atten_mask": masked, "keep_prob": keep, "sparse_mode": mode}
        heads = query.shape[1]
        found = npu_function("npu_fusion_attention")(query, key, value, heads, "BNSD", scale=scale, **options)
        out, highest, sums, softmax, *drawn = found
        ctx.save_for_backward(query, key, value, bias, masked, highest, sums, softmax, out)
        ctx.drawn, ctx.scale, ctx.keep, ctx.mode = drawn, scale, keep, mode
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, bias, masked, *softmax = saved_tensors(ctx, "sdpa_attention by npu")
        gradients = npu_function("npu_fusion_attention_grad")(
            query,
            key,
            value,
            grad.contiguous(),
            query.shape[1],
            "BNSD",
            pse=bias,
            atten_mask=masked,
            scale_value=ctx.scale,
            keep_prob=ctx.keep,
            sparse_mode=ctx.mode,
            **dict(zip(_SOFTMAX, (*softmax, *ctx.drawn), strict=True)),
        )
        dquery, dkey, dvalue, dbias, *_ = gradients
        return dquery, dkey, dvalue, dbias if ctx.needs_input_grad[3] else None, None, None, None, None


def _attention(given: Inputs, dropout: float, before_scale: bool) -> torch.Tensor:
    """``[B, N, Sq, D]``; ``before_scale`` says that what is added to the scores is scaled with them."""
    query, key, value = (tensor.contiguous() for tensor in (given.query, given.key, given.value))
    scale, keep = given.scale, 1.0 - dropout
    if given.causal:
        return _Attention.apply(query, key, value, None, _pattern(query.device), scale, keep, CAUSAL)  # type: ignore[no-any-return]
    if given.mask is None:
        return _Attention.apply(query, key, value, None, None, scale, keep, PLAIN)  # type: ignore[no-any-return]
    mask, empty = without_empty_rows(given.mask, query.dtype)
    bias = masked = None
    if mask.dtype == torch.bool:
        masked = (~mask).expand(query.shape[0], mask.shape[1], query.shape[2], key.shape[2]).contiguous()
    else:
        bias = additive(mask / scale if before_scale else mask, query.dtype)
        bias = bias.expand(*query.shape[:3], key.shape[2]).contiguous()
    out = _Attention.apply(query, key, value, bias, masked, scale, keep, PLAIN)
    return with_means(out, empty, given)


def scaled_with_the_scores(device: torch.device) -> bool:
    """Whether what is added to the scores is multiplied by their scale, which isn't published: a small input shows it.

    Raises:
        RuntimeError: neither gives the attention.
    """
    query, key, value = (random_tensor(1, 1, 16, 16, seed=seed) for seed in (1, 2, 3))
    bias = random_tensor(1, 1, 16, 16, seed=4)
    expected, _ = original(None, query, key, value, bias, scaling=0.5)
    q, k, v, mask = (tensor.to(device, torch.float16) for tensor in (query, key, value, bias))
    for before_scale in (True, False):
        with torch.no_grad():
            out = _attention(Inputs(q, k, v, mask, causal=False, scale=0.5), 0.0, before_scale).transpose(1, 2)
        if torch.allclose(out.cpu().float(), expected, rtol=1e-2, atol=1e-2):
            return before_scale
    raise RuntimeError("npu_fusion_attention adds its pse neither before nor after the scores are scaled")


def load(target: Any, site: Site) -> Callable[..., Any]:
    """A function with the signature of transformers'."""
    before_scale = scaled_with_the_scores(site.device)

    def attend(given: Inputs, dropout: float) -> torch.Tensor:
        return _attention(given, dropout, before_scale)

    return function_of(attend, _reason, "npu_attention")  # type: ignore[no-any-return]


def _reason(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: Any
) -> str | None:
    why = tensors_reason(query, key, value) or call_reason(query, key, value, mask, options)
    if why is not None:
        return why
    if query.shape[1] > MOST_HEADS or query.shape[-1] > WIDEST:
        return "more than 256 heads or 512 channels"
    return None if query.shape[-1] == value.shape[-1] else "values of another width than queries"
