"""Derivatives of operators that move elements, and at most convert them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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


def decomposition(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """An operator as PyTorch itself makes it of others: a kernel to begin with.

    Where PyTorch has none it is the operator itself, whose calls are then counted as ``delegated``.
    """
    from torch._decomp import decomposition_table

    return decomposition_table.get(overload, overload)


def by_autograd(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, arguments: Sequence[Any]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a function made of differentiable operators, by computing it once more.

    Args:
        grad: that of the result.
        arguments: the function's, in the order of its signature.

    Returns:
        One for each argument; None where there is none.
    """
    wanted = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor) and value.requires_grad]
    again = torch.is_grad_enabled()  # the gradient's own gradient is wanted
    with torch.enable_grad():
        # By aliases: of an argument that another one was computed from, only its own part belongs here.
        inputs = [
            arguments[i].view_as(arguments[i]) if again else arguments[i].detach().requires_grad_() for i in wanted
        ]
        given = list(arguments)
        for i, value in zip(wanted, inputs, strict=True):
            given[i] = value
        by_name = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        leading = len(given) - len(by_name)
        named = {p.name: value for p, value in zip(by_name, given[leading:], strict=True)}
        result = function(*given[:leading], **named)
        found = torch.autograd.grad(result, inputs, grad, create_graph=again, allow_unused=True)
    grads: list[torch.Tensor | None] = [None] * len(arguments)
    for i, value in zip(wanted, found, strict=True):
        grads[i] = value
    return tuple(grads)
