"""Calls that an operator takes, found by trying: a schema says the kinds of the arguments, but not which fit together.

A call is tried on the CPU with small tensors. Of tensors the shapes are sought, the same for all first, and then with
sizes that have letters: ``("ab", "bc")`` is what a product of matrices takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.aten.arguments import Arguments, plain_type
from twinkle.aten.harness.cases import Case
from twinkle.aten.scaffold.overloads import TYPES, is_given_tensor

CANDIDATES: dict[str, Callable[[list[int]], Sequence[Any]]] = {
    "int": lambda shape: (1, 0, 2),
    "float": lambda shape: (0.5,),
    "bool": lambda shape: (False, True),
    "str": lambda shape: ("none",),
    "Sequence[int]": lambda shape: ([1], [0], shape[-1:], [1, 1], [2, 2], [-1]),
    "Sequence[float]": lambda shape: ([1.0],),
    "torch.dtype": lambda shape: ("{dtype}",),
    "torch.memory_format": lambda shape: ("contiguous_format",),
}
"""By Python's type, what is tried for an argument that is no tensor, beside a first tensor of a shape; the rest have to
be written."""

FIRST = ("ab", "nab", "a")
OTHERS = ("ab", "bc", "cb", "ac", "ba", "b", "a", "c", "nab", "nbc", "ncb", "nac")
"""Shapes of the first tensor and of those beside it, by letters."""

DTYPES = (None, "int64", "bool")
"""Of one of the tensors; None is the case's. Whole numbers are small then, so that they can be indices."""

TRIED = {"a": 5, "b": 7, "c": 4, "n": 6}
"""Sizes, all different: what fits by chance doesn't fit."""

MOST_CALLS, MOST_VALUES = 4000, 60
"""So many are tried: calls in all, some tenths of a second, and values beside the tensors of one pattern."""


@dataclass(frozen=True)
class Pattern:
    """What the tensors of a call are.

    Attributes:
        shapes: argument -> letters; empty where all have one shape, whichever it is.
        dtypes: argument -> dtype, of those that don't have the case's.
        given: optional arguments that must be given all the same.
        refusal: what PyTorch said where no call was found.
    """

    shapes: Mapping[str, str]
    dtypes: Mapping[str, str]
    given: tuple[str, ...] = ()
    refusal: str | None = None


def pattern_of(overload: torch._ops.OpOverload) -> Pattern:
    """The simplest pattern with which a call works; the simplest of all, with a refusal, where none does."""
    refusal = None
    left = MOST_CALLS
    for pattern in _patterns(overload):
        tensors = {name: described(pattern, name, [3, 4], TRIED) for name in tensors_of(overload, pattern.given)}
        for others in _others(overload, pattern, tensors):
            found = attempt(overload, {**tensors, **others}, torch.float32)
            if isinstance(found, torch.Tensor):
                return pattern
            refusal, left = refusal or found, left - 1
        if left <= 0:
            break
    return Pattern({}, {}, refusal=refusal or "an argument of its has a type for which nothing can be tried")


def tensors_of(overload: torch._ops.OpOverload, given: Sequence[str] = ()) -> list[str]:
    """The arguments that are tensors in each call."""
    arguments = overload._schema.arguments
    return [a.name for a in arguments if is_given_tensor(a) or (a.name in given and plain_type(a) == "Tensor")]


def described(pattern: Pattern, name: str, same: Sequence[int], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A contiguous tensor for an argument, as ``inputs_spec.yaml`` has it."""
    letters = pattern.shapes.get(name)
    made: dict[str, Any] = {"shape": list(same) if letters is None else [sizes[letter] for letter in letters]}
    if name in pattern.dtypes:
        made |= {"dtype": pattern.dtypes[name], "values": "few"}
    return made


def values_for(
    overload: torch._ops.OpOverload, pattern: Pattern, tensors: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any] | str:
    """The arguments beside the tensors with which PyTorch takes a call; else what it says to the first tried."""
    refusal = None
    for others in _others(overload, pattern, tensors):
        found = attempt(overload, {**tensors, **others}, dtype)
        if isinstance(found, torch.Tensor):
            return others
        refusal = refusal or found
    return refusal or "an argument of its has a type for which nothing can be tried"


def attempt(overload: torch._ops.OpOverload, arguments: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor | str:
    """The operator called with arguments as ``inputs_spec.yaml`` describes them; or what it says to them."""
    case = Case("tried", overload, dtype, dict(arguments))
    try:
        return Arguments(overload).call(overload, case.values())
    except Exception as error:  # whatever an operator makes of arguments that don't fit
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _others(overload: torch._ops.OpOverload, pattern: Pattern, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names, candidates = [], []
    first = next(iter(tensors.values()))["shape"]
    for argument in overload._schema.arguments:
        kind = plain_type(argument)
        if kind != "Tensor" and (argument.name in pattern.given or not argument.has_default_value()):
            names.append(argument.name)
            candidates.append(CANDIDATES[TYPES[kind]](first) if TYPES[kind] in CANDIDATES else ())
    product = itertools.islice(itertools.product(*candidates), MOST_VALUES)
    return (dict(zip(names, values, strict=True)) for values in product)


def _patterns(overload: torch._ops.OpOverload) -> Iterator[Pattern]:
    """The simplest first; with optional arguments, one and then all of them, only where nothing is taken without."""
    optional = [a.name for a in overload._schema.arguments if a.has_default_value() and a.default_value is None]
    for given in ((), *((name,) for name in optional), tuple(optional)):
        tensors = tensors_of(overload, given)
        for dtypes in _dtypes(tensors):
            yield Pattern({}, dtypes, given)
        for shapes in _shapes(tensors):
            for dtypes in _dtypes(tensors):
                yield Pattern(shapes, dtypes, given)


def _dtypes(tensors: Sequence[str]) -> list[dict[str, str]]:
    return [{}, *({name: dtype} for dtype in DTYPES[1:] if dtype for name in tensors)]


def _shapes(tensors: Sequence[str]) -> Iterator[dict[str, str]]:
    for first in FIRST:
        for others in itertools.product(OTHERS, repeat=len(tensors) - 1):
            yield dict(zip(tensors, (first, *others), strict=True))
