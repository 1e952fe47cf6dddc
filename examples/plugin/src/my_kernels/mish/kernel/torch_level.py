"""``mish`` by other operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten.gradients import by_autograd


def mish_torch(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::mish``: ``x * tanh(log(1 + exp(x)))``, in fp32 at least."""
    wide = self.to(torch.promote_types(self.dtype, torch.float32))
    return (wide * torch.tanh(torch.nn.functional.softplus(wide))).to(self.dtype)


def mish_pullback(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient of ``self``, from that of the result."""
    return by_autograd(mish_torch, grad, arguments)
