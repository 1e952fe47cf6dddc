"""Calls that an operator's author doesn't list, found by trying: with numbers for tensors, and such as PyTorch refuses.

Both are asked for while the operator isn't registered. What they yield is the name that reports have for a call, and
its arguments in the schema's order, on a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.naming import dtype_name

NUMBERS = (True, 3, 0.1, 0.5j)
BESIDE_NUMBERS = (torch.float32, torch.bfloat16, torch.int64)
"""Dtypes of the tensors beside one."""

OTHER_DTYPES = (torch.float32, torch.float64, torch.int64)
"""One tensor of a call is tried in each of them that it doesn't have: another width, another kind of numbers."""


def number_calls(spec: OperatorSpec, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """The operator's first case with a number for one of several tensors, ``x * 0.5``, where PyTorch takes that.

    Such a number doesn't decide the result's dtype as a tensor would, least of all beside a tensor without dimensions.
    The tensors hold twos, have each of some dtypes, and the case's shapes or none.
    """
    case = next(iter(cases(spec, seeds=1)))
    arguments_of = Arguments(spec.overload)
    given = case.values(device)
    tensors = [place for place, value in enumerate(given) if isinstance(value, torch.Tensor)]
    if len(tensors) < 2:
        return
    for place in tensors[Semantics.IN_PLACE in spec.semantics :]:
        for number, dtype, shaped in itertools.product(NUMBERS, BESIDE_NUMBERS, (True, False)):

            def arguments(place: int = place, number: Any = number, dtype: Any = dtype, shaped: Any = shaped) -> Any:
                made = list(given)
                for each in tensors:
                    shape = given[each].shape if shaped else ()
                    made[each] = torch.full(shape, 2, dtype=dtype, device=device)
                made[place] = number
                return made

            try:
                arguments_of.call(spec.native, arguments())
            except Exception:  # this operator takes no number there, or not beside such a tensor
                continue
            beside = f"{dtype_name(dtype)}{'' if shaped else ' without dimensions'}"
            yield f"{case.name}, {arguments_of.names[place]} the number {number} beside {beside}", arguments()


def refused_calls(spec: OperatorSpec, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """The operator's first case with one of its tensors in another dtype or shape, where PyTorch raises for that.

    A kernel that takes such a call reads memory that isn't its argument's, or gives numbers that mean nothing, where a
    program would have been told of its mistake.
    """
    case = next(iter(cases(spec, seeds=1)))
    arguments_of = Arguments(spec.overload)
    for place, name in enumerate(arguments_of.names):
        given = case.values(device)[place]
        for what, other in _others(given) if isinstance(given, torch.Tensor) else ():
            tried, arguments = case.values(device), case.values(device)
            tried[place], arguments[place] = other.clone(), other
            try:
                arguments_of.call(spec.native, tried)
            except Exception:  # which, and that ours is the same, is seen when it is called for that
                yield f"{case.name}, {name} {what}", arguments


def _others(given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Ones, which are in range as indices too."""
    for dtype in OTHER_DTYPES:
        if dtype is not given.dtype:
            yield f"in {dtype_name(dtype)}", torch.ones_like(given, dtype=dtype)
    shape = list(given.shape)
    for dimension, size in enumerate(shape):
        longer = [*shape[:dimension], size + 1, *shape[dimension + 1 :]]
        yield f"of shape {longer}", torch.ones(longer, dtype=given.dtype, device=given.device)
    for other in ([1, *shape], *([shape[1:]] if shape else [])):
        yield f"of shape {other}", torch.ones(other, dtype=given.dtype, device=given.device)
