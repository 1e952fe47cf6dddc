"""``silu`` by other operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten.gradients import by_autograd, decomposition


def silu_torch(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::silu``: what PyTorch's own decomposition makes of it."""
    return decomposition(torch.ops.aten.silu.default)(self)


def silu_pullback(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all tensors, from that of the result."""
    return by_autograd(silu_torch, grad, arguments)
