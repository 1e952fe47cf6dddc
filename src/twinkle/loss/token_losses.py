"""The loss of each token from its logits, and the gradient of the logits in their place."""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

import torch

Backend = Literal["triton", "torch"]


class Recipe(NamedTuple):
    """What is computed; see :func:`twinkle.loss.linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float | None = None


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """What computes the losses best: ``"triton"``, which needs no memory but the logits', where it can."""
    able = device.type == "cuda" and dtype != torch.float64 and importlib.util.find_spec("triton") is not None
    return "triton" if able else "torch"


def token_losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    recipe: Recipe,
    upstream: torch.Tensor | None,
    backend: Backend,
) -> torch.Tensor:
    """The losses of tokens; with ``upstream``, the gradient of the logits is written over them.

    Args:
        logits: ``[tokens, V]`` contiguous, floating-point.
        target: ``[tokens]`` int64.
        class_weight: ``[V]`` in fp32 (fp64 with fp64 logits), or None.
        upstream: ``[tokens]``, what each token's loss is worth, or None when no gradient is wanted.

    Returns:
        ``[tokens]``, fp32 (fp64 with fp64 logits); 0 where the target is ignored.
    """
    if backend == "triton":
        from twinkle.loss.triton_token_losses import token_losses as by_triton

        return by_triton(logits, target, class_weight, recipe, upstream)
    return by_formula(logits, target, class_weight, recipe, upstream)


def by_formula(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    recipe: Recipe,
    upstream: torch.Tensor | None,
) -> torch.Tensor:
    """The same written out, for every device."""
    classes, smoothing = logits.shape[-1], recipe.label_smoothing
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * recipe.scale
    capped = None
    if recipe.softcap is not None:
        capped = torch.tanh(z / recipe.softcap)
        z = capped * recipe.softcap
    counts = target != recipe.ignore_index
    index = target.where(counts, 0)[:, None]
    if logits.device.type == "cpu" and not bool(((index >= 0) & (index < classes)).all()):
        raise IndexError(f"linear_cross_entropy: a target is out of bounds; wanted 0 to {classes - 1}")
    weights = z.new_ones(classes) if class_weight is None else class_weight
    hard = (1 - smoothing) * weights[index[:, 0]]
    # Not by z - lse: what is lost in it where both are large would be a relative error of every probability.
    log_shares = torch.log_softmax(z, dim=-1)
    losses = -hard * log_shares.gather(1, index)[:, 0]
    if smoothing:
        losses -= (log_shares @ weights) * (smoothing / classes)
    lse = torch.logsumexp(z, dim=-1)
    losses += recipe.z_loss * lse.square()
    if upstream is not None:
        gradient = torch.exp(log_shares)
        gradient *= (hard + weights.sum() * (smoothing / classes) + 2 * recipe.z_loss * lse)[:, None]
        if smoothing:
            gradient -= weights * (smoothing / classes)
        gradient.scatter_add_(1, index, -hard[:, None])
        gradient *= (upstream * recipe.scale)[:, None]
        if capped is not None:
            gradient *= 1 - capped.square()
        logits.copy_(gradient.where(counts[:, None], 0))
    return losses.where(counts, 0)
