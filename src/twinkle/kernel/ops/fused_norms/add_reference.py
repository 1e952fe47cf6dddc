"""A residual sum and the RMSNorm of it, as decoder layers compute them between attention and MLP.

What a backend gives is a function with the signature of :func:`original`, differentiable in both summands and the
weight. It may carry ``accepts_call(*same arguments) -> str | None``: a reason lets the modules compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.ops.rms_norm.reference import Cast, rms_norm
from twinkle.kernel.probe import random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"

VARIANT = "norm of a residual sum"
"""The only one: the norm's kind is an argument."""

SumAndNorm = tuple[torch.Tensor, torch.Tensor]


def original(
    residual: torch.Tensor,
    summand: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float,
    cast: Cast,
    compute_dtype: torch.dtype = torch.float32,
) -> SumAndNorm:
    """The sum, and its norm over the last dimension.

    Args:
        residual, summand: ``[..., H]``, floating.
        weight: ``[H]``.
        eps, offset, cast, compute_dtype: see :mod:`twinkle.kernel.ops.rms_norm.reference`.

    Returns:
        both ``[..., H]``: the sum in the wider of the summands' dtypes, the norm as its kind gives it.
    """
    total = residual + summand
    return total, rms_norm(total, weight, eps, offset=offset, cast=cast, compute_dtype=compute_dtype)


def probe(site: Site) -> str | Reason:
    """All places are alike, and the installer finds them; no function of a model's is one."""
    return VARIANT if site.original is original else Reason("variant", "only an installer finds sums before a norm")


def build(variant: str, compute_dtype: torch.dtype = torch.float32) -> Callable[..., SumAndNorm]:
    """The maths itself."""

    def sum_and_norm(*tensors: torch.Tensor, **kind: Any) -> SumAndNorm:
        return original(*tensors, **kind, compute_dtype=compute_dtype)

    return sum_and_norm


def example(site: Site, variant: str) -> Example:
    """A few tokens."""
    residual, summand = (random_tensor(2, 5, 48, seed=seed) for seed in (1, 2))
    weight = 1 + random_tensor(48, seed=3) / 4
    return Example(None, (residual, summand, weight), {"eps": 1e-6, "offset": 0.0, "cast": "before"})
