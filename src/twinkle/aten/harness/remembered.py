"""Conditions that are asked once for a layout must look at nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from twinkle.aten.arguments import PLAIN, layout
from twinkle.aten.conditions import READABLE
from twinkle.aten.harness.cases import cases
from twinkle.aten.layouts import filled
from twinkle.aten.spec import Condition, OperatorSpec


def looks_at_more(condition: Condition, device: torch.device, calls: Sequence[Sequence[Any]] = ()) -> bool:
    """Whether a condition that isn't ``each_time`` tells apart two calls that are laid out alike.

    Args:
        condition: asked about the call beyond it, and about others like that.
        device: where the call beyond it is.
        calls: further calls: those that it holds of, where one beyond it fails for another reason already.
    """
    if condition.each_time:
        return False
    try:
        beyond = tuple(condition.beyond(device))
    except NotImplementedError:
        beyond = ()  # the device has no such tensors
    for call in filter(None, (beyond, *calls)):
        for one, other in _alike(tuple(call)):
            if layout(one, {}) == layout(other, {}) is not None and _holds(condition, one) != _holds(condition, other):
                return True
    return False


def kinds_of_calls(spec: OperatorSpec, device: torch.device) -> list[list[Any]]:
    """The operator's first case with each choice of tensors and of their dtypes; optional tensors are given in some."""
    found: dict[Any, list[Any]] = {}
    for case in cases(spec, seeds=1):
        values = case.values(device)
        found.setdefault(tuple(getattr(value, "dtype", None) for value in values), values)
    return list(found.values())


def _holds(condition: Condition, call: tuple[Any, ...]) -> bool:
    """What a condition can't be asked about doesn't fit either."""
    try:
        return bool(condition.holds(*call))
    except Exception:
        return False


def _alike(call: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Pairs of calls: with other elements everywhere; with one tensor whose elements aren't what its memory holds."""
    for number in (0, 1):
        yield call, tuple(_another(value, number) for value in call)
    for place, value in enumerate(call):
        for one, other in lazy_pairs(value) if _is_plain(value) else ():
            yield (*call[:place], one, *call[place + 1 :]), (*call[:place], other, *call[place + 1 :])


def lazy_pairs(value: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal tensors of a given one's shape. The second isn't what its memory holds: it waits to be negated
    or conjugated, or is zero and has no memory."""
    if value.dtype in READABLE - {torch.bool}:
        yield value, torch._neg_view(-value)
    if value.is_floating_point():
        number = torch.ones_like(value, dtype=torch.complex64)
        yield number, number.conj()
    zero = torch._efficientzerotensor(value.shape, dtype=value.dtype, device=value.device)
    yield _another(zero, 0), zero


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def _another(value: Any, number: int) -> Any:
    """A tensor in memory of its own, of the same layout, without a history; all its elements are that number."""
    if not _is_plain(value):
        return value
    return filled(number, value.shape, value.stride(), value.dtype, value.device)
