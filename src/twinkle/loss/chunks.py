"""The computation of :func:`twinkle.loss.linear_cross_entropy`, a chunk of tokens at a time, apart from autograd.

Shapes throughout: ``x [T, H]``, ``weight [V, H]``, ``bias [V]``, ``target [T]``, ``class_weight [V]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from twinkle.loss.token_losses import Backend, Recipe, token_losses

Reduction = Literal["none", "mean", "sum"]
Accumulation = Literal["fp32", "weight"]
Found = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of ``x``, ``weight`` and ``bias``; None for those that aren't wanted."""


class Settings(NamedTuple):
    """What is computed, and how: see :func:`twinkle.loss.linear_cross_entropy`."""

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

    Args:
        wanted: which of ``x``, ``weight`` and ``bias`` get a gradient.
    """
    recipe, reduction, accumulate, chunk, backend = settings
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    class_weight = None if class_weight is None else class_weight.to(x.device, wide)
    worth = None
    if reduction != "none":  # what a token's loss is worth, apart from the gradient that will come
        worth = torch.ones((), dtype=wide, device=x.device)
        if reduction == "mean":
            worth = worth / _weight_of_tokens(target, class_weight, recipe.ignore_index, wide)
    gradients = _Gradients(x, weight, bias, wanted if worth is not None else (False,) * 3, accumulate)
    losses = torch.empty(target.shape, dtype=wide, device=x.device)
    for at in range(0, x.shape[0], chunk):
        part = slice(at, at + chunk)
        logits = torch.nn.functional.linear(x[part], weight, bias)
        upstream = None if worth is None or not gradients else worth.expand(logits.shape[0])
        losses[part] = token_losses(logits, target[part], class_weight, recipe, upstream, backend)
        gradients.add(part, logits)  # logits are their gradient now
    return losses if worth is None else losses.sum() * worth, gradients.found


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
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    class_weight = None if class_weight is None else class_weight.to(x.device, wide)
    gradients = _Gradients(x, weight, bias, wanted, settings.accumulate)
    for at in range(0, x.shape[0], settings.chunk):
        part = slice(at, at + settings.chunk)
        logits = torch.nn.functional.linear(x[part], weight, bias)
        token_losses(logits, target[part], class_weight, settings.recipe, upstream[part], settings.backend)
        gradients.add(part, logits)
    dx, dw, db = gradients.found
    return (
        None if dx is None else dx.to(x.dtype),
        None if dw is None else dw.to(weight.dtype),
        None if db is None or bias is None else db.to(bias.dtype),
    )


def _weight_of_tokens(
    target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean divides by, a scalar."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    return (class_weight[target.where(counts, 0)] * counts).sum()


def scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in another dtype, in one pass."""
    if gradient.dtype == dtype:
        return gradient * factor.to(dtype)
    return torch.mul(gradient, factor.to(gradient.dtype), out=torch.empty_like(gradient, dtype=dtype))


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
        dtype = wide if accumulate == "fp32" else weight.dtype
        self.dx = torch.empty_like(x) if wanted[0] else None
        self.dw = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None
        self.db = torch.zeros(weight.shape[:1], dtype=wide, device=weight.device) if wanted[2] else None

    def __bool__(self) -> bool:
        return any(gradient is not None for gradient in self.found)

    @property
    def found(self) -> Found:
        return self.dx, self.dw, self.db

    def add(self, part: slice, dlogits: torch.Tensor) -> None:
        """Takes in a chunk's gradient of the logits, ``[tokens, V]``."""
        if self.dx is not None:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if self.dw is not None:
            _add_product(self.dw, dlogits.t(), self.x[part])
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, where ``total`` may be of a wider dtype than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # cuBLAS adds to fp32 what it multiplies in bf16 or fp16
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
