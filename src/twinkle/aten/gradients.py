"""Derivatives of operators that move elements, and at most convert them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twinkle.aten.spec import Pullback


def identity(kernel: Callable[[list[Any]], torch.Tensor], values: list[Any]) -> tuple[torch.Tensor, Pullback]:
    """Of ``clone`` and ``contiguous``: the gradient passes as it is."""
    return kernel(values), lambda grad: (grad,)


def overwrite(kernel: Callable[[list[Any]], torch.Tensor], values: list[Any]) -> tuple[torch.Tensor, Pullback]:
    """Of ``copy_(to, source)``: nothing of what ``to`` was is left. Broadcasting is undone by autograd itself."""
    dtype = values[1].dtype
    return kernel(values), lambda grad: (torch.zeros_like(grad), grad.to(dtype))


def conversion(kernel: Callable[[list[Any]], torch.Tensor], values: list[Any]) -> tuple[torch.Tensor, Pullback]:
    """Of ``type_as(self, other)``: the gradient passes in the dtype of ``self``; of a real number it is real."""
    dtype = values[0].dtype

    def pullback(grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        real = grad if dtype.is_complex or not grad.is_complex() else torch.real(grad)
        return real.to(dtype), None

    return kernel(values), pullback
