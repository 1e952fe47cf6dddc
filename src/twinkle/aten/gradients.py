"""Derivatives of operators that move elements, and at most convert them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from twinkle.aten.conditions import tensor
from twinkle.aten.serving import interference
from twinkle.aten.spec import Pullback

_PLAIN = [condition.holds for condition in tensor(0, "grad", lambda grad: (grad,), without=("empty",))]


def is_plain(grad: torch.Tensor) -> bool:
    """Whether a kernel may read a gradient's memory, as it would an argument's.

    Of a gradient no condition is asked before, and it may come from anywhere: sparse, negated, zero without memory, one
    of a batch, or with a tangent. Operators of PyTorch know what all these are; a pointer doesn't.
    """
    return (
        interference(at_autograd=True) is None
        and all(holds(grad) for holds in _PLAIN)
        and not torch._C._functorch.is_legacy_batchedtensor(
            grad
        )  # of ``torch.autograd.grad(…, is_grads_batched=True)``
    )


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
    by_name = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    leading = len(arguments) - len(by_name)

    def of_wanted(*inputs: torch.Tensor) -> torch.Tensor:
        given = list(arguments)
        for i, value in zip(wanted, inputs, strict=True):
            given[i] = value
        return function(*given[:leading], **dict(zip(by_name, given[leading:], strict=True)))

    grad = grad if grad.layout is torch.strided else grad.to_dense()  # few derivatives know of sparse gradients
    grads: list[torch.Tensor | None] = [None] * len(arguments)
    for i, value in zip(wanted, _once_more(of_wanted, grad, [arguments[i] for i in wanted]), strict=True):
        grads[i] = value
    return tuple(grads)


def _once_more(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradients of a function's arguments, each of which has one."""
    if torch._C._are_functorch_transforms_active():  # in which nothing can be made to require a gradient
        found: Sequence[torch.Tensor] = torch.func.vjp(function, *inputs)[1](grad)
        return found
    again = torch.is_grad_enabled()  # the gradient's own gradient is wanted
    with torch.enable_grad():
        # By aliases: of an argument that another one was computed from, only its own part belongs here.
        inputs = [each.view_as(each) if again else each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad, create_graph=again, allow_unused=True)
