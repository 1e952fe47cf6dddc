"""Cross-entropy of a linear head's outputs, as transformers' causal language models compute it.

What a backend gives is a function with the signature of :func:`original`, differentiable in ``x``, ``weight`` and
``bias``. It may carry ``accepts_call(*same arguments) -> str | None``: a reason gives the model its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.probe import random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"

VARIANT = "cross-entropy of a linear head"
"""The only one: scale and cap are arguments."""


def original(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The loss, by PyTorch's own function, of all logits.

    Args:
        x: ``[N, H]``, what goes into the head.
        weight, bias: ``[V, H]`` and ``[V]``, the head's.
        target: ``[N]`` int64.
        scale: what the logits are multiplied by.
        softcap: then they become ``softcap * tanh(logits / softcap)``.
        class_weight, ignore_index, reduction, label_smoothing: as in ``F.cross_entropy``.
    """
    logits = F.linear(x, weight, bias).to(compute_dtype) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    class_weight = None if class_weight is None else class_weight.to(compute_dtype)
    return F.cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def probe(site: Site) -> str | Reason:
    """All places are alike, and the installer finds them; no function of a model's is one."""
    return VARIANT if site.original is original else Reason("variant", "only an installer finds a model's loss")


def build(variant: str, compute_dtype: torch.dtype = torch.float32) -> Callable[..., torch.Tensor]:
    """The maths itself."""

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        return original(x, weight, target, compute_dtype=compute_dtype, **options)

    return loss


def example(site: Site, variant: str) -> Example:
    """A few tokens, one of them ignored, and a cap. No scale, which not every backend has."""
    target = torch.tensor([3, 0, -100, 6, 1], device="cpu")
    args: tuple[Any, ...] = (random_tensor(5, 16, seed=1), random_tensor(7, 16, seed=2), target)
    return Example(None, args, {"softcap": 4.0})
