"""RMSNorm of queries and of keys, each head by itself, and their rotary embedding, as attention modules compute it.

What a backend gives is a function with the signature of :func:`original`, differentiable in queries, keys and weights.
It may carry ``accepts_call(*same arguments) -> str | None``: a reason lets the modules compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.ops.rms_norm.reference import Cast, rms_norm
from twinkle.kernel.ops.rotary.reference import Dialect, rotate
from twinkle.kernel.probe import random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"

VARIANT = "norms and half-split rotary of queries and keys"
"""The only one: the norms' kind is an argument."""

DIALECT = Dialect()
"""How the rotary function pairs channels; of those only."""

Rotated = tuple[torch.Tensor, torch.Tensor]


def original(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_eps: float,
    k_eps: float,
    offset: float,
    cast: Cast,
    heads_at: int,
    compute_dtype: torch.dtype = torch.float32,
) -> Rotated:
    """The norms, and then the rotation of what they give.

    Args:
        q, k: ``[B, S, heads, D]`` with ``heads_at=2``, ``[B, heads, S, D]`` with 1; the number of heads may differ.
        q_weight, k_weight: ``[D]``.
        cos, sin: ``[B or 1, S, R]``; the first R channels rotate, half-split, the others are only normalised.
        q_eps, k_eps, offset, cast: see :mod:`twinkle.kernel.ops.rms_norm.reference`.
        compute_dtype: what the norms' statistics are computed in.

    Returns:
        ``[B, heads, S, D]`` of each, in the wider of the norm's dtype and the tables'.
    """
    results = []
    for x, weight, eps in ((q, q_weight, q_eps), (k, k_weight, k_eps)):
        normed = rms_norm(x, weight, eps, offset=offset, cast=cast, compute_dtype=compute_dtype)
        normed = normed.transpose(1, 2) if heads_at == 2 else normed
        results.append(rotate(normed, cos.unsqueeze(1), sin.unsqueeze(1), DIALECT))
    return results[0], results[1]


def probe(site: Site) -> str | Reason:
    """All places are alike, and the installer finds them; no function of a model's is one."""
    return VARIANT if site.original is original else Reason("variant", "only an installer finds norms before a rotary")


def build(variant: str, compute_dtype: torch.dtype = torch.float32) -> Callable[..., Rotated]:
    """The maths itself."""

    def norms_and_rotary(*tensors: torch.Tensor, **kind: Any) -> Rotated:
        return original(*tensors, **kind, compute_dtype=compute_dtype)

    return norms_and_rotary


def example(site: Site, variant: str) -> Example:
    """Two sequences, more query heads than key heads, and a rotation of half of each head."""
    head_dim, turning = 32, 16
    q, k = (random_tensor(2, 5, heads, head_dim, seed=heads) for heads in (4, 2))
    weights = [1 + random_tensor(head_dim, seed=seed) / 4 for seed in (5, 6)]
    angles = random_tensor(1, 5, turning // 2, seed=7).repeat(1, 1, 2)
    options = {"q_eps": 1e-6, "k_eps": 1e-6, "offset": 0.0, "cast": "before", "heads_at": 2}
    return Example(None, (q, k, *weights, angles.cos(), angles.sin()), options, fixed=(4, 5))
