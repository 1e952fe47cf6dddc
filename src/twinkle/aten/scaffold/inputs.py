"""The lists of calls of a new operator: its ``inputs_spec.yaml`` and its ``benchmark.yaml``, of calls that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from twinkle.aten.arguments import Arguments, plain_type
from twinkle.aten.harness.cases import Case
from twinkle.aten.scaffold.calls import Pattern, attempt, described, tensors_of, values_for
from twinkle.aten.scaffold.overloads import TYPES

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Of a case that names none, as far as PyTorch has the operator for them on the CPU."""


@dataclass(frozen=True)
class Kind:
    """One case of the list.

    Attributes:
        same: the tensor, where all have one shape.
        sizes: those of the letters, where they have several; a tensor then lies in memory as ``layout`` says.
        dtypes: those that it is about, all when left out.
        gradient: whether its gradient is compared with finite differences.
    """

    same: Mapping[str, Any]
    sizes: Mapping[str, int] | None
    layout: str = "contiguous"
    dtypes: tuple[str, ...] = DTYPES
    gradient: bool = False


CASES = {
    "contiguous": Kind({"shape": [3, 1050]}, {"a": 3, "b": 1050, "c": 34, "n": 5}),
    "transposed": Kind(
        {"shape": [33, 50], "strides": [1, 33], "offset": 3}, {"a": 33, "b": 50, "c": 20, "n": 5}, "transposed"
    ),
    "gaps": Kind({"shape": [5, 7, 3], "strides": [64, 8, 2], "offset": 1}, {"a": 21, "b": 6, "c": 35, "n": 4}, "gaps"),
    "scalar": Kind({"shape": []}, None),
    "zeros": Kind({"shape": [4, 9], "values": "zeros"}, {"a": 4, "b": 9, "c": 6, "n": 4}, dtypes=("float32",)),
    "special": Kind(
        {"shape": [7, 31], "values": "special"}, {"a": 7, "b": 31, "c": 5, "n": 4}, dtypes=("float32", "bfloat16")
    ),
    "small": Kind(
        {"shape": [3, 4], "strides": [1, 3]},
        {"a": 4, "b": 5, "c": 6, "n": 4},
        "transposed",
        dtypes=("float64",),
        gradient=True,
    ),
}
"""By name."""

OTHER_VALUES = {"float": (0.25, -2.0), "int": (0, 1, 2), "bool": (True, False), "Sequence[int]": ([1], [0])}
"""By Python's type, what an argument is given in a case of its own; never what it has in the others."""

TIMED = {
    "contiguous": {
        "accelerator": ([16384, 16384], {"a": 4096, "b": 4096, "c": 4096, "n": 16}),
        "cpu": ([1024, 2048], {"a": 256, "b": 512, "c": 256, "n": 8}),
        "quick": ([3, 1050], {"a": 3, "b": 1050, "c": 34, "n": 5}),
    },
    "small": dict.fromkeys(("accelerator", "cpu", "quick"), ([64], {"a": 8, "b": 8, "c": 8, "n": 4})),
}
"""By name and size: the shape where all tensors have one, and the sizes of the letters."""


def inputs(overload: torch._ops.OpOverload, pattern: Pattern) -> str:
    """The text of ``inputs_spec.yaml``: what the operator doesn't take on the CPU is a comment that says so."""
    usable = [
        d for d in DTYPES if pattern.refusal or isinstance(_values(overload, pattern, CASES["contiguous"], d), dict)
    ]
    head = f"seeds_per_case: 3\ndtypes: [{', '.join(usable or DTYPES)}]\n"
    lines = list(_refusal(pattern))
    for name, kind in CASES.items():
        lines += _case(overload, pattern, name, kind, usable or list(DTYPES))
    for argument in () if pattern.refusal else overload._schema.arguments:
        lines += _other(overload, pattern, argument, usable)
    return head + "cases:\n" + "\n".join(lines)


def _refusal(pattern: Pattern) -> Iterator[str]:
    if pattern.refusal is not None:
        yield "  # Write calls that the operator takes: no shapes were found with which it does. It said"
        yield f"  # {pattern.refusal}"


def _other(overload: torch._ops.OpOverload, pattern: Pattern, argument: Any, usable: Sequence[str]) -> Iterator[str]:
    """A case in which an argument that is no tensor has another value: by all others a kernel may ignore it."""
    python, kind = TYPES[plain_type(argument)], CASES["contiguous"]
    usual = _values(overload, pattern, kind, usable[0]) if usable else ""
    if python not in OTHER_VALUES or not isinstance(usual, dict):
        return
    default = argument.default_value if argument.has_default_value() else None
    for value in OTHER_VALUES[python]:
        other = {argument.name: value}
        if value != usual.get(argument.name, default) and isinstance(
            _values(overload, pattern, kind, usable[0], other), dict
        ):
            yield from _case(overload, pattern, f"other {argument.name}", kind, usable, other)
            return


def _case(
    overload: torch._ops.OpOverload,
    pattern: Pattern,
    name: str,
    kind: Kind,
    usable: Sequence[str],
    other: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[str]:
    wanted = [dtype for dtype in kind.dtypes if dtype in usable] or usable[:1]
    tensors = _tensors(overload, pattern, kind)
    if tensors is None:
        yield f"  # No {name}: its tensors have other numbers of dimensions."
        return
    found = {dtype: _values(overload, pattern, kind, dtype, other) for dtype in wanted}
    taken = {dtype: values for dtype, values in found.items() if isinstance(values, dict)}
    if pattern.refusal is not None:
        taken = {dtype: {} for dtype in wanted}
        if name not in ("contiguous", "small"):
            return
    if not taken:
        yield f"  # No {name}, which PyTorch doesn't take: {found[wanted[0]]}"
        return
    values = next(iter(taken.values()))
    yield f"  - name: {name}"
    if kind.gradient and _has_gradient(overload, {**tensors, **values}):
        yield "    gradient: true"
    if tuple(taken) != tuple(usable):
        yield f"    dtypes: [{', '.join(taken)}]"
    yield "    arguments:"
    yield from (f"      {argument}: {value}" for argument, value in _written(overload, {**tensors, **values}))


def timed(overload: torch._ops.OpOverload, pattern: Pattern) -> str:
    """The cases of ``benchmark.yaml``."""
    lines = []
    for name, sizes in TIMED.items():
        lines += [f"  - name: {name}", f"    dtypes: [{'bfloat16, ' if name == 'contiguous' else ''}float32]"]
        for size, (same, letters) in sizes.items():
            tensors = {each: described(pattern, each, same, letters) for each in tensors_of(overload, pattern.given)}
            quick = {each: described(pattern, each, *sizes["quick"]) for each in tensors}
            values = values_for(overload, pattern, quick, torch.float32)
            others = values if isinstance(values, dict) else {}
            text = ", ".join(f"{a}: {value}" for a, value in _written(overload, {**tensors, **others}))
            lines.append(f"    {size}: {{{text}}}")
    return "\n".join(lines)


def _tensors(overload: torch._ops.OpOverload, pattern: Pattern, kind: Kind) -> dict[str, Any] | None:
    found = {}
    for name in tensors_of(overload, pattern.given):
        if not pattern.shapes:
            made = dict(kind.same)
            if name in pattern.dtypes:
                made |= {"dtype": pattern.dtypes[name], "values": "few"}
        elif kind.sizes is None:
            return None
        else:
            made = described(pattern, name, (), kind.sizes)
            made |= _layout(made["shape"], kind.layout)
            if "values" in kind.same and name not in pattern.dtypes:
                made["values"] = kind.same["values"]
        found[name] = made
    return found


def _layout(shape: list[int], layout: str) -> dict[str, Any]:
    """Of a tensor in memory: its last two dimensions the other way round, or each number beside a gap."""
    strides = list(torch.empty(shape, device="meta").stride())
    if layout == "gaps":
        return {"strides": [2 * stride for stride in strides], "offset": 1}
    if layout == "transposed" and len(shape) > 1:
        strides[-2:] = [1, shape[-2]]
        return {"strides": strides, "offset": 3}
    return {}


def _values(
    overload: torch._ops.OpOverload,
    pattern: Pattern,
    kind: Kind,
    dtype: str,
    other: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any] | str:
    """The arguments beside the tensors, some of them given, with which PyTorch takes a call; else what it says."""
    tensors = _tensors(overload, pattern, kind)
    found = "" if tensors is None else values_for(overload, pattern, tensors, getattr(torch, dtype))
    if tensors is None or isinstance(found, str) or not other:
        return found
    found |= other
    result = attempt(overload, {**tensors, **found}, getattr(torch, dtype))
    return result if isinstance(result, str) else found


def _written(overload: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments in the schema's order, as YAML on one line each."""
    for argument in overload._schema.arguments:
        if argument.name in arguments:
            yield argument.name, _yaml(arguments[argument.name])
        elif not argument.has_default_value():  # nothing could be tried
            yield argument.name, "???"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, str) and value.startswith("{"):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_gradient(overload: torch._ops.OpOverload, arguments: dict[str, Any]) -> bool:
    """Whether PyTorch's own passes the comparison that ours will be put to."""
    values = Case("tried", overload, torch.float64, arguments).values()
    inputs = [v.requires_grad_() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    try:
        return torch.autograd.gradcheck(lambda *_: Arguments(overload).call(overload, values), inputs)
    except Exception:  # no gradient, or none at these numbers
        return False
