"""Reading the files that list an operator's calls, and what is said about wrong ones before anything is called.

``goldendata/inputs_spec.yaml`` lists those that are checked, ``benchmark.yaml`` those that are timed. What a
description may hold: see :mod:`twinkle.aten.harness.cases`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from twinkle.aten.arguments import is_optional, plain_type
from twinkle.aten.fields import MAPPING, TRUTH, WORD, WORDS, Field, check, is_list_of, is_whole, is_word, read_yaml
from twinkle.aten.harness.fills import FILLS, FLOATING_ONLY
from twinkle.aten.spec import OperatorSpec
from twinkle.reasons import did_you_mean


class InputsError(ValueError):
    """A file that lists an operator's inputs can't be used; the message says which, and where."""


NAMED = {"MemoryFormat": torch.memory_format, "ScalarType": torch.dtype, "Layout": torch.layout}
"""By the schema's type, what a name of ``torch`` may stand for."""

_COUNT = Field("a whole number, 1 or more", lambda value: is_whole(value) and value > 0)
_SIZES = Field("a list of whole numbers, 0 or more", is_list_of(lambda n: is_whole(n) and n >= 0))
_CASES = Field("a list of cases", lambda value: isinstance(value, list) and bool(value))
_INPUTS = {"operator": WORD, "seeds_per_case": _COUNT, "dtypes": WORDS.or_none(), "cases": _CASES}
_TIMED = {"operator": WORD, "cases": _CASES}
_NAME = Field(
    "a word of letters, digits, spaces and .,+-",
    lambda value: is_word(value) and bool(re.fullmatch(r"\w[\w .,+-]*", value)),
)
"""Golden data are in files of that name."""
_CASE = {"name": _NAME, "arguments": MAPPING, "dtypes": WORDS.or_none(), "gradient": TRUTH.or_none()}
SIZES = ("accelerator", "cpu", "quick")
"""Of each call that is timed."""
_TIMED_CASE = {"name": _NAME, "dtypes": WORDS, **dict.fromkeys(SIZES, MAPPING)}
_TENSOR = {
    "shape": _SIZES,
    "strides": _SIZES.or_none(),
    "offset": Field("a whole number, 0 or more", lambda value: is_whole(value) and value >= 0).or_none(),
    "dtype": WORD.or_none(),
    "values": WORD.or_none(),
}


def listed_inputs(spec: OperatorSpec) -> dict[str, Any]:
    """What an operator's ``goldendata/inputs_spec.yaml`` holds: ``seeds_per_case`` and ``cases``, each with its dtypes.

    Raises:
        InputsError: the file is another operator's, has no cases, or one that can't be understood.
    """
    found = _read(spec, inputs_file(spec), _INPUTS)
    for case, where in _each(found["cases"], inputs_file(spec), _CASE):
        with _naming(where):
            case["dtypes"] = case.get("dtypes") or found.get("dtypes")
            if not case["dtypes"]:
                raise ValueError("neither the case nor the file says its dtypes")
            _check_arguments(spec, case["arguments"], case["dtypes"])
    return found


def listed_timed(spec: OperatorSpec) -> list[dict[str, Any]]:
    """The cases that an operator's ``benchmark.yaml`` holds.

    Raises:
        InputsError: likewise.
    """
    found = _read(spec, benchmark_file(spec), _TIMED)
    for case, where in _each(found["cases"], benchmark_file(spec), _TIMED_CASE):
        for size in SIZES:
            with _naming(f"{where}, {size}"):
                _check_arguments(spec, case[size], case["dtypes"])
    return found["cases"]


def inputs_file(spec: OperatorSpec) -> Path:
    """Where the calls of an operator that are checked are listed."""
    return spec.home.folder / "goldendata" / "inputs_spec.yaml"


def benchmark_file(spec: OperatorSpec) -> Path:
    """Where the calls of an operator that are timed are listed."""
    return spec.home.folder / "benchmark.yaml"


def _read(spec: OperatorSpec, file: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    try:
        found = read_yaml(file)
    except ValueError as error:
        raise InputsError(str(error)) from None
    with _naming(str(file)):
        check(found, fields, "a list of calls")
        if found["operator"] != spec.name:
            raise ValueError(f"it lists calls of {found['operator']!r}, and this is {spec.name}")
    return found


def _each(cases: list[Any], file: Path, fields: Mapping[str, Field]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each case with what messages call it: its number, and its name once that is known to be one."""
    names: set[str] = set()
    for number, case in enumerate(cases, start=1):
        with _naming(f"{file}, case {number}"):
            check(case, fields, "a case")
            # Its numbers are made from its name, and the file of its golden data has it.
            if case["name"] in names:
                raise ValueError(f"another case has the name {case['name']!r}")
            names.add(case["name"])
        yield case, f"{file}, case {number} ({case['name']})"


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InputsError(f"{where}: {error}") from None


def _check_arguments(spec: OperatorSpec, arguments: dict[str, Any], dtypes: list[str]) -> None:
    for dtype in dtypes:
        _named(dtype, torch.dtype)
    declared = {argument.name: argument for argument in spec.overload._schema.arguments}
    for unknown in arguments.keys() - declared.keys():  # left out, it would be another call than the one meant
        raise ValueError(f"{spec.name} has no argument {unknown!r}{did_you_mean(unknown, declared)}")
    for name, argument in declared.items():
        given, kind = arguments.get(name), plain_type(argument)
        if given is None:
            if not (argument.has_default_value() or name == "device" or is_optional(argument)):
                raise ValueError(f"the argument {name!r} is missing, which has no default")
        elif kind == "Tensor" and not isinstance(given, (bool, int, float)):  # PyTorch makes tensors of numbers
            try:
                _check_tensor(given, dtypes)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif isinstance(given, dict):
            raise ValueError(f"{name} is no tensor but of the type {kind}: {given!r}")
        elif kind in NAMED and given != "{dtype}":
            _named(given, NAMED[kind])


def _check_tensor(given: dict[str, Any], dtypes: list[str]) -> None:
    check(given, _TENSOR, "a tensor")
    strides = given.get("strides")
    if strides is not None and len(strides) != len(given["shape"]):
        raise ValueError(f"strides are as many as sizes: {strides}, and shape {given['shape']}")
    values = given.get("values") or "normal"
    if values not in FILLS:
        raise ValueError(f"no values {values!r}; known: {', '.join(FILLS)}{did_you_mean(values, FILLS)}")
    for dtype in [given["dtype"]] if given.get("dtype") else dtypes:
        if not _named(dtype, torch.dtype).is_floating_point and values in FLOATING_ONLY:
            raise ValueError(f"values {values!r} are there for floating-point dtypes only, not for {dtype}")


def _named(name: Any, kind: type) -> Any:
    """What a name of ``torch`` stands for."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, kind):
        known = [each for each in vars(torch) if isinstance(getattr(torch, each), kind)]
        raise ValueError(f"no torch.{kind.__name__} {name!r}{did_you_mean(name, known)}")
    return found
