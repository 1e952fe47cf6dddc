"""Gradients that are to be differentiated again, where one input of an operator was computed from another; and inputs
that somebody wrote into.

Of an input only its own part belongs into its gradient: what comes by way of the other input, autograd adds by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from twinkle.aten.gradients import by_autograd
from twinkle.gradients import gradients_by_formula
from twinkle.kernel.ops.rms_norm import reference
from twinkle.kernel.ops.rms_norm.gated_reference import gated_rms_norm
from twinkle.kernel.ops.rms_norm.torch import FORMULATIONS
from twinkle.loss import linear_cross_entropy


def product(a: Any, b: Any) -> Any:
    return a.sin() * b * b


class _Product(torch.autograd.Function):
    """``product`` with a backward that is given its gradients by one of the helpers."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, gradients: Callable[..., tuple[Any, ...]]) -> Any:
        ctx.save_for_backward(a, b)
        ctx.gradients = gradients
        return product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        with torch.enable_grad():
            return (*ctx.gradients(grad, *ctx.saved_tensors), None)


HELPERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "gradients_by_formula": lambda grad, a, b: gradients_by_formula(product, (a, b), (True, True), grad),
    "by_autograd": lambda grad, a, b: by_autograd(product, grad, (a, b)),
}


def first_and_second(function: Callable[[Any], Any], x: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return [first.detach(), *torch.autograd.grad(first.square().sum(), x)]


@pytest.mark.parametrize("helper", HELPERS)
def test_an_input_computed_from_another_counts_once(helper: str) -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours = first_and_second(lambda x: _Product.apply(x, 2 * x, HELPERS[helper]), x)
    torch.testing.assert_close(ours, first_and_second(lambda x: product(x, 2 * x), x))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_norm_whose_weight_is_computed_from_its_input(formulation: str, gated: bool) -> None:
    def ours(x: Any) -> Any:
        return FORMULATIONS[formulation].norm(x, 2 * x[0], 3 * x if gated else None, 1e-6, 0.0)

    def formula(x: Any) -> Any:
        if gated:
            return gated_rms_norm(x, 3 * x, 2 * x[0], 1e-6)
        return reference.rms_norm(x, 2 * x[0], 1e-6)

    x = torch.linspace(-1, 1, 15).view(3, 5)
    torch.testing.assert_close(first_and_second(ours, x), first_and_second(formula, x), rtol=1e-4, atol=1e-4)


def _norm(x: Any) -> Any:
    return FORMULATIONS["cpu"].norm(x, torch.ones(6, dtype=x.dtype), None, 1e-6, 0.0)


def _loss(x: Any) -> Any:
    return linear_cross_entropy(x, torch.ones(3, 6, dtype=x.dtype), torch.zeros(4, dtype=torch.long), reduction="none")


@pytest.mark.parametrize(("function", "kernel"), [(_norm, "rms_norm by torch"), (_loss, "linear_cross_entropy")])
def test_an_input_that_was_written_into_is_told_whose_it_was(function: Callable[[Any], Any], kernel: str) -> None:
    x = torch.ones(4, 6, dtype=torch.bfloat16, requires_grad=True) * 1
    result = function(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        result.sum().backward()
    (note,) = raised.value.__notes__
    assert f"a kernel of twinkle, {kernel}," in note and "write x = x + y" in note


def test_other_errors_of_what_was_saved_are_as_they_were() -> None:
    result = _norm(torch.ones(4, 6, requires_grad=True) * 1).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="second time") as raised:
        result.backward()
    assert not hasattr(raised.value, "__notes__")
