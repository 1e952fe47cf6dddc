"""The computation of :func:`twinkle.loss.linear_cross_entropy`, a chunk of tokens at a time, apart from autograd.

Shapes throughout: ``x [T, H]``, ``weight [V, H]``, ``bias [V]``, ``target [T]``, ``class_weight [V]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from twinkle.loss.token_losses import Backend, Recipe, token_losses

Reduction = Literal["none", "sum"]
Accumulation = Literal["fp32", "weight"]
Found = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of ``x``, ``weight`` and ``bias``; None for those that aren't wanted."""


class Settings(NamedTuple):
    """What is computed, and how: see :func:`twinkle.loss.linear_cross_entropy`; :func:`mean_of` a sum is the mean."""

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
    gradients = _Gradients(x, weight, bias, (False,) * 3 if reduction == "none" else wanted, accumulate)
    # Without the gradient that will come, and a mean's divisor with it: shares of many tokens are too small for fp16.
    one = torch.ones((), dtype=wide, device=x.device) if gradients else None
    losses = torch.empty(target.shape, dtype=wide, device=x.device)
    for at in range(0, x.shape[0], chunk):
        part = slice(at, at + chunk)
        logits = torch.nn.functional.linear(x[part], weight, bias)
        upstream = None if one is None else one.expand(logits.shape[0])
        losses[part] = token_losses(logits, target[part], class_weight, recipe, upstream, backend)
        gradients.add(part, logits)  # logits are their gradient now
    return losses if reduction == "none" else losses.sum(), gradients.found


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


def mean_of(
    total: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The mean of losses from their sum. Where no token counts it is NaN, and yet the gradient zero, as PyTorch's."""
    counts = target != ignore_index
    if class_weight is None:
        divisor = counts.sum().to(total.dtype)
    else:
        divisor = (class_weight.to(total.device, total.dtype)[target.where(counts, 0)] * counts).sum()
    some = counts.any()
    return total / divisor.where(some, 1) + torch.zeros_like(total).where(some, torch.nan)


def scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in another dtype, in one pass. The factor, a scalar, isn't rounded to the gradient's dtype."""
    return torch.mul(gradient, factor.reshape((1,) * gradient.dim()), out=torch.empty_like(gradient, dtype=dtype))


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
    elif total.is_cuda and torch.version.hip is None:  # cuBLAS adds to fp32 what it multiplies in bf16 or fp16
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
