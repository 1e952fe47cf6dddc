"""``dropout`` by other operators of PyTorch: on the CPU the same numbers as PyTorch's own."""

from __future__ import annotations

import torch

from twinkle.aten.spec import WithPullback


def dropout_torch(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """See ``aten::dropout``, for 0 < p < 1 in training."""
    return dropout_torch_with_pullback(input, p, train)[0]


def dropout_torch_with_pullback(input: torch.Tensor, p: float, train: bool) -> WithPullback:
    """The result, the gradient of ``input`` from that of the result, and the factors that it takes."""
    scale = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
    return input * scale, lambda grad, scale: (grad * scale,), scale
