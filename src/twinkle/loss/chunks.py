"""The computation of :func:`twinkle.loss.linear_cross_entropy`, a chunk of tokens at a time, apart from autograd.

Shapes throughout: ``x [T, H]``, ``weight [V, H]``, ``bias [V]``, ``target [T]``, ``class_weight [V]``, the latter in
the dtype of the losses, see :func:`dtype_of_losses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from twinkle.loss.token_losses import Backend, Recipe, token_losses

Reduction = Literal["none", "sum"]
Accumulation = Literal["fp32", "weight"]
Found = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of ``x``, ``weight`` and ``bias``; None for those that aren't wanted."""


class Settings(NamedTuple):
    """What is computed, and how: see :func:`twinkle.loss.linear_cross_entropy`; :func:`mean_of` a sum is the mean.

    ``chunk`` is the most tokens at a time.
    """

    recipe: Recipe
    reduction: Reduction
    accumulate: Accumulation
    chunk: int
    backend: Backend


def evaluate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    settings: Settings,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, Found]:
    """The loss, and its gradients where it is one number; they are of the dtypes that they were summed up in.

    They are the caller's, to be overwritten by :func:`twinkle.loss.scaling.scaled_in_place`.

    Args:
        wanted: which of ``x``, ``weight`` and ``bias`` get a gradient.
    """
    of_tokens = settings.reduction == "none"
    gradients = _Gradients(x, weight, bias, (False,) * 3 if of_tokens else wanted, settings.accumulate)
    # Without the gradient that will come, and a mean's divisor with it: shares of many tokens are too small for fp16.
    one = torch.ones((), dtype=dtype_of_losses(x), device=x.device).expand(target.shape) if gradients else None
    losses = _chunk_by_chunk(x, weight, bias, target, class_weight, one, settings, gradients)
    return losses if of_tokens else losses.sum(), gradients.found


def differentiate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    upstream: torch.Tensor,
    settings: Settings,
    wanted: Sequence[bool],
) -> Found:
    """The gradients for ``upstream [T]``, the gradients of the tokens' losses, in the dtypes of what they belong to."""
    gradients = _Gradients(x, weight, bias, wanted, settings.accumulate)
    _chunk_by_chunk(x, weight, bias, target, class_weight, upstream, settings, gradients)
    dx, dw, db = gradients.found
    return (
        None if dx is None else dx.to(x.dtype),
        None if dw is None else dw.to(weight.dtype),
        None if db is None or bias is None else db.to(bias.dtype),
    )


def _chunk_by_chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    upstream: torch.Tensor | None,
    settings: Settings,
    gradients: _Gradients,
) -> torch.Tensor:
    """The losses ``[T]``; with ``upstream``, what they are worth, the gradients are added to ``gradients``."""
    losses = torch.empty(target.shape, dtype=dtype_of_losses(x), device=x.device)
    for part in chunks_of(x.shape[0], settings.chunk):
        logits = torch.nn.functional.linear(x[part], weight, bias)
        worth = None if upstream is None else upstream[part]
        losses[part] = token_losses(logits, target[part], class_weight, settings.recipe, worth, settings.backend)
        gradients.add(part, logits)  # logits are their gradient now
        del logits  # before the next ones are made: the two would be most of what the loss takes
    return losses


def dtype_of_losses(x: torch.Tensor) -> torch.dtype:
    """What everything after the logits is computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def mean_of(
    total: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The mean of losses from their sum. Where no token counts it is NaN, and yet the gradient zero, as PyTorch's."""
    counts = target != ignore_index
    if class_weight is None:
        divisor = counts.sum().to(total.dtype)
    else:
        divisor = (class_weight[target.where(counts, 0)] * counts).sum()
    some = counts.any()
    return total / divisor.where(some, 1) + torch.zeros_like(total).where(some, torch.nan)


def chunks_of(tokens: int, most: int) -> Iterator[slice]:
    """As few chunks as can be, as equal as can be, in whole tiles of a matrix product.

    On an H200 a product of 1408 or 1664 tokens took a tenth longer per token than one of 1280, 1536 or 2048, and a
    rest of 512 as long as twice as many.
    """
    tile = min(256, most)
    tiles = -(-tokens // tile)
    count = -(-tiles // (most // tile))
    ends = [tile * (tiles * (number + 1) // count) for number in range(count)]
    return (slice(start, min(end, tokens)) for start, end in zip([0, *ends], ends, strict=False))


class _Gradients:
    """Gradients of ``x``, ``weight`` and ``bias``, chunk by chunk; None for those that aren't wanted."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: Sequence[bool],
        accumulate: Accumulation,
    ) -> None:
        self.x, self.weight = x, weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dtype = wide if accumulate == "fp32" else weight.dtype
        self.wants_dw = wanted[1]
        self.dx = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
        self.dw: torch.Tensor | None = None
        self.db = torch.zeros(weight.shape[:1], dtype=wide, device=weight.device) if wanted[2] else None

    def __bool__(self) -> bool:
        return self.dx is not None or self.wants_dw or self.db is not None

    @property
    def found(self) -> Found:
        if self.wants_dw and self.dw is None:  # there were no tokens
            self.dw = torch.zeros(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        return self.dx, self.dw, self.db

    def add(self, part: slice, dlogits: torch.Tensor) -> None:
        """Takes in a chunk's gradient of the logits, ``[tokens, V]``."""
        if self.dx is not None:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if self.wants_dw:
            self.dw = _add_product(self.dw, dlogits.t(), self.x[part], self.dtype)
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``total + a @ b``, in place where there is a total; ``dtype`` may be wider than that of the factors."""
    # cuBLAS adds to fp32 what it multiplies in bf16 or fp16.
    if dtype != a.dtype and a.is_cuda and torch.version.hip is None:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    a, b = a.to(dtype), b.to(dtype)
    return a @ b if total is None else total.addmm_(a, b)
