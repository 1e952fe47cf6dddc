"""Calls that PyTorch refuses, found by trying.

A kernel that takes such a call reads memory that isn't its argument's, or gives numbers that mean nothing, where a
program would have been told of its mistake. An author lists calls that work, so nothing else comes upon these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import cases
from twinkle.aten.spec import OperatorSpec
from twinkle.naming import dtype_name

DTYPES = (torch.float32, torch.float64, torch.int64)
"""One tensor of a call is tried in each of them that it doesn't have: another width, another kind of numbers."""


def refused_calls(spec: OperatorSpec, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """The operator's first case with one of its tensors in another dtype or shape, where PyTorch raises for that.

    Must be asked while the operator isn't registered.

    Returns:
        What reports call it, and the arguments in the schema's order, on the device.
    """
    case = next(iter(cases(spec, seeds=1)))
    call = Arguments(spec.overload).call
    for place, name in enumerate(argument.name for argument in spec.overload._schema.arguments):
        given = case.values(device)[place]
        for what, other in _others(given) if isinstance(given, torch.Tensor) else ():
            tried, arguments = case.values(device), case.values(device)
            tried[place], arguments[place] = other.clone(), other
            try:
                call(spec.native, tried)
            except Exception:  # which, and that ours is the same, is seen when it is called for that
                yield f"{case.name}, {name} {what}", arguments


def _others(given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Ones, which are in range as indices too."""
    for dtype in DTYPES:
        if dtype is not given.dtype:
            yield f"in {dtype_name(dtype)}", torch.ones_like(given, dtype=dtype)
    shape = list(given.shape)
    for dimension, size in enumerate(shape):
        longer = [*shape[:dimension], size + 1, *shape[dimension + 1 :]]
        yield f"of shape {longer}", torch.ones(longer, dtype=given.dtype, device=given.device)
    for other in ([1, *shape], *([shape[1:]] if shape else [])):
        yield f"of shape {other}", torch.ones(other, dtype=given.dtype, device=given.device)
