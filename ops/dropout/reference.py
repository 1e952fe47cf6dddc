"""What ``dropout`` computes, and how to tell whether a result can be it."""

from __future__ import annotations

import math

import torch


def dropout_reference(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Each element of a CPU tensor is zero with probability ``p``, else ``1 / (1 - p)`` times what it was."""
    if not train or p == 0:
        return input
    result = torch.empty_like(input)
    kept = torch.rand(input.shape) >= p
    result[...] = torch.where(kept, input.double() / (1 - p), 0.0).to(input.dtype)
    return result


def judge(result: torch.Tensor, input: torch.Tensor, p: float, train: bool) -> str | None:
    """What is wrong with a result, whatever numbers were drawn; None when nothing is.

    The share of zeros may be five standard deviations off. A kept element is two roundings off at most: that of
    ``1 / (1 - p)`` and that of the product.
    """
    result, input = result.detach().cpu(), input.detach().cpu()
    if not train or not 0 < p < 1:
        expected = torch.zeros_like(input) if train and p == 1 else input
        return None if torch.equal(result, expected) else "not what it is without drawing"
    dropped = result == 0
    kept = ~dropped
    expected = input.double() / (1 - p)
    close = torch.isclose(result.double(), expected, rtol=2 * torch.finfo(input.dtype).eps, atol=0.0)
    if not bool(close[kept].all()):
        return f"{int((~close & kept).sum())} elements were neither dropped nor scaled"
    number = int((input != 0).sum())
    share = float((dropped & (input != 0)).sum()) / max(number, 1)
    if abs(share - p) > 5 * math.sqrt(p * (1 - p) / max(number, 1)):
        return f"the share of zeros is {share:.3f}, of {number} elements, with p={p}"
    return None
