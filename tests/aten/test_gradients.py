"""The operators' own derivatives, which are called directly, at whatever key the operator would be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.aten.conftest import SIMULATED
from twinkle.aten import Profile, catalog
from twinkle.aten.arguments import Arguments
from twinkle.aten.direct import _serving_on
from twinkle.aten.harness.cases import cases
from twinkle.aten.spec import WITHOUT_GRADIENT, OperatorSpec, Semantics

EVERY = [part for name in catalog.names() for part in catalog.operator(name).parts]
DIFFERENTIABLE = [spec for spec in EVERY if not spec.semantics & WITHOUT_GRADIENT]

Back = Callable[..., tuple[torch.Tensor, ...]]
"""From the gradient of a result to those of the arguments, as often as is wanted."""


def graph(
    spec: OperatorSpec,
    function: Callable[..., torch.Tensor],
    chip: Profile,
    dtype: torch.dtype = torch.float64,
    given: list[Any] | None = None,
) -> tuple[torch.Tensor, Back]:
    """A result of the operator by a function, of a case that the kernel takes, small in float64 if it can be; and the
    way back.

    Args:
        given: gets the call's arguments.
    """
    takes = _serving_on(spec, torch.device(chip.device).type).refusal
    every = list(cases(spec, seeds=1))
    small = [case for case in every if case.gradient and dtype is torch.float64]
    wanted = (*small, *(case for case in every if case.dtype is torch.float32))
    values = next(values for case in wanted if takes(values := case.values(chip.device)) is None)
    floating = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    inputs = [values[i].requires_grad_() for i in floating]
    if Semantics.IN_PLACE in spec.semantics:
        values[0] = values[0] * 1  # a leaf can't be written
    if given is not None:
        given += values
    torch.manual_seed(0)
    result = Arguments(spec.overload).call(function, values)

    def back(grad: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        found = torch.autograd.grad(result, inputs, grad, retain_graph=True, allow_unused=True, **options)
        return tuple(each for each in found if each is not None)

    return result, back


def negated(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return back(torch._neg_view(-grad))


def sparse(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.to_dense() for each in back(grad.to_sparse()))


def zero(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Added to what it should be."""
    nothing = torch._efficientzerotensor(grad.shape, dtype=grad.dtype, device=grad.device)
    return tuple(map(torch.add, back(grad), back(nothing)))


def batched(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each[1] for each in back(torch.stack([grad * 2, grad]), is_grads_batched=True))


def mapped(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each[1] for each in torch.func.vmap(back)(torch.stack([grad * 2, grad])))


def dual(back: Back, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A sum that is the gradient where both it and the tangents are right: they are what it would be of theirs."""
    with forward_ad.dual_level():
        straight = [forward_ad.unpack_dual(each) for each in back(forward_ad.make_dual(grad, grad * 2))]
        across = [forward_ad.unpack_dual(each) for each in back(forward_ad.make_dual(grad * 2, grad))]
    return tuple(one.primal + other.tangent - one.tangent / 2 for one, other in zip(straight, across, strict=True))


KINDS = [negated, sparse, zero, batched, mapped, dual]


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=lambda spec: spec.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_gradient_of_any_kind(operator: OperatorSpec, kind: Callable[..., Any], chip: Profile) -> None:
    """Gives what a plain one of the same elements gives. It may raise where PyTorch's own derivative does."""
    if kind is sparse and SIMULATED:
        pytest.skip("the simulated device has no sparse tensors")
    native, ours = (or_error(lambda f=f: apply(operator, f, kind, chip)) for f in (operator.native, operator.aten))
    if isinstance(ours, Exception):
        assert isinstance(native, Exception), ours
    else:
        assert all(map(torch.allclose, *ours))


def apply(
    spec: OperatorSpec, function: Callable[..., torch.Tensor], kind: Callable[..., Any], chip: Profile
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The gradients from one of that kind, and those that they should be."""
    result, back = graph(spec, function, chip)
    grad = torch.linspace(-1, 2, result.numel(), dtype=result.dtype, device=result.device).view(result.shape)
    return kind(back, grad), back(grad)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=lambda spec: spec.name)
def test_autocast_has_no_say_in_what_is_computed_inside(operator: OperatorSpec, chip: Profile) -> None:
    """Around the call of a kernel, or around the backward pass alone: the numbers are those without it."""
    autocast = functools.partial(torch.autocast, torch.device(chip.device).type, torch.bfloat16)
    found = []
    for forward, backward in ((False, False), (True, False), (False, True)):
        with autocast(enabled=forward):
            result, back = graph(operator, operator.aten, chip, torch.float32)
        with autocast(enabled=backward):
            found.append([result.detach(), *back(torch.ones_like(result))])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


SAVED_ALIKE = [spec for spec in DIFFERENTIABLE if spec.name != "scaled_dot_product_attention"]
"""Of PyTorch's several kernels for attention, some save copies."""


@pytest.mark.parametrize("operator", SAVED_ALIKE, ids=lambda spec: spec.name)
def test_an_argument_may_be_written_before_the_backward_pass_where_it_may_natively(
    operator: OperatorSpec, chip: Profile
) -> None:
    """As an optimizer or a teacher's average writes parameters; what the derivative needs can't be."""

    def raised(function: Callable[..., torch.Tensor], place: int) -> bool:
        values: list[Any] = []
        result, back = graph(operator, function, chip, given=values)
        with torch.no_grad():
            values[place].add_(0)
        try:
            back(torch.ones_like(result))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return True
        return False

    values: list[Any] = []
    graph(operator, operator.native, chip, given=values)
    places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    found = {place: (raised(operator.native, place), raised(operator.aten, place)) for place in places}
    assert not any(ours and not native for native, ours in found.values()), found


def or_error(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return error
