"""The files of a new operator's package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch

from twinkle.aten.arguments import Arguments, is_optional, plain_type
from twinkle.aten.errors import RegistrationError
from twinkle.aten.scaffold.calls import TRIED, Pattern, attempt, described, pattern_of, tensors_of, values_for
from twinkle.aten.scaffold.inputs import inputs, timed
from twinkle.aten.scaffold.overloads import TYPES, text_of
from twinkle.aten.scaffold.place import Place
from twinkle.aten.shipped import shipped

_SUFFIX = ".template"

_HELPERS = ("beside", "dimensions", "floating", "one_device", "one_dtype", "tensor")
"""What ``register.py`` may need of :mod:`twinkle.aten.conditions`."""


def make(overload: torch._ops.OpOverload, folder: Path) -> Path:
    """Writes an operator's package into a new folder of its name.

    Args:
        overload: see :func:`overload_of`.
        folder: that of the other operators; what it is imported as is its own name, see :class:`Place`.

    Returns:
        The package.

    Raises:
        RegistrationError: the folder is there already, or can't be imported from.
    """
    name = overload._schema.name.removeprefix("aten::")
    place = Place.of(folder)
    package = folder / name
    if package.exists():
        raise RegistrationError.of(name, "exists", f"{package} is there already", "remove it, or edit it")
    values = _values(name, overload) | {"module": place.module(name), "path": place.path(name)}
    templates = shipped("template")
    for file in sorted(templates.rglob(f"*{_SUFFIX}")):
        target = package / file.relative_to(templates).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(file.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    return package


def _values(name: str, overload: torch._ops.OpOverload) -> dict[str, str]:
    declared = overload._schema.arguments
    schema = text_of(overload)
    parameters = [_parameter(argument, default) for argument, default in _with_defaults(overload)]
    if any(argument.kwarg_only for argument in declared):
        parameters.insert(next(i for i, argument in enumerate(declared) if argument.kwarg_only), "*")
    signature = ", ".join(parameters)
    if len(signature) > 80:
        signature = "\n    " + ",\n    ".join(parameters) + ",\n"
    arguments = ", ".join(f"{a.name}={a.name}" if a.kwarg_only else a.name for a in declared)
    path = f"{name}.{overload._overloadname}"
    lists = "\nfrom collections.abc import Sequence" if "Sequence[" in signature else ""
    pattern = pattern_of(overload)
    conditions = "\n".join(_conditions(overload, pattern))
    return {
        "name": name,
        "imported": ", ".join(sorted([f"{name}_aten", "register_a1"])),
        "one_line": schema,
        "schema": _schema(schema),
        "torch": "\nimport torch\n" if "torch." in conditions else "",
        "helpers": ", ".join(name for name in _HELPERS if f"{name}(" in conditions),
        "signature": signature,
        "arguments": arguments,
        "overload": path,
        "call": f"{path}({arguments})",
        "sequences": lists,
        "sequences_before_torch": f"{lists}\n" if lists else "",
        "conditions": conditions,
        "inputs": inputs(overload, pattern),
        "timed": timed(overload, pattern),
    }


def _schema(text: str) -> str:
    """The schema as Python source, on as many lines as it needs."""
    if len(text) < 100:
        return _literal(text)
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    spaced = [*(f"{line} " for line in lines[:-1]), lines[-1]]
    return "\n".join(["(", *(f"        {_literal(line)}" for line in spaced), "    )"])


def _with_defaults(overload: torch._ops.OpOverload) -> list[tuple[Any, Any]]:
    return list(zip(overload._schema.arguments, Arguments(overload).bind((), {}), strict=True))


def _parameter(argument: Any, default: Any) -> str:
    kind = TYPES[plain_type(argument)] + (" | None" if is_optional(argument) else "")
    return f"{argument.name}: {kind}" + (f" = {_literal(default)}" if argument.has_default_value() else "")


def _literal(value: Any) -> str:
    """A value as Python source, text in double quotes unless it has some."""
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def _conditions(overload: torch._ops.OpOverload, pattern: Pattern) -> list[str]:
    """A tensor's own, for each that is always given, and the dtypes that the template's kernel is right for."""
    given = {name: place for place, name in enumerate(a.name for a in overload._schema.arguments)}
    names = tensors_of(overload)
    lines = [f'*tensor({given[name]}, "{name}", lambda t: {_call(overload, pattern, name)})' for name in names]
    numbers = next((name for name in names if name not in pattern.dtypes), names[0])
    lines.append(f"floating({given[numbers]}, lambda t: {_call(overload, pattern, numbers)})")
    tensors = [name for name in tensors_of(overload, pattern.given) if name in given]
    if len(tensors) > 1:
        places = ", ".join(str(given[name]) for name in tensors)
        lines.append(f"one_device(({places}), lambda t: {_call(overload, pattern, tensors[0])})")
    lines += _refused(overload, pattern, given)
    return [_wrapped(line) for line in lines]


def _refused(overload: torch._ops.OpOverload, pattern: Pattern, given: Mapping[str, int]) -> Iterator[str]:
    """What PyTorch raises for and a kernel might not: tensors of several dtypes, and of other numbers of dimensions."""
    names = tensors_of(overload)
    tried = {name: described(pattern, name, [3, 4], TRIED) for name in tensors_of(overload, pattern.given)}
    values = values_for(overload, pattern, tried, torch.float32)
    if not isinstance(values, dict):
        return

    def refuses(name: str, **other: Any) -> bool:
        call = {**tried, **values, name: {**tried[name], **other}}
        return isinstance(attempt(overload, call, torch.float32), str)

    alike = [name for name in names if name not in pattern.dtypes]
    if len(alike) > 1 and any(refuses(name, dtype="bfloat16") for name in alike):
        places = ", ".join(str(given[name]) for name in alike)
        yield f"one_dtype(({places}), lambda t: {_call(overload, pattern, alike[0])})"
    for name in names if pattern.shapes else ():
        if refuses(name, shape=[1, *tried[name]["shape"]]):
            count = len(pattern.shapes[name])
            yield f'dimensions({given[name]}, "{name}", {count}, lambda t: {_call(overload, pattern, name)})'


def _wrapped(call: str) -> str:
    """A call as the formatter lays it out: on one line, its arguments on another, or each on its own."""
    if len(call) + 9 <= 120:
        return f"        {call},"
    function, _, arguments = call.removesuffix(")").partition("(")
    body = [f"            {arguments}"]
    if len(body[0]) > 120:
        leading, _, rest = arguments.partition("lambda")
        each_own = (*re.split(r", (?![^(]*\))", leading.rstrip(", ")), f"lambda{rest}")
        body = [f"            {each}," for each in each_own]
    return "\n".join([f"        {function}(", *body, "        ),"])


def _call(overload: torch._ops.OpOverload, pattern: Pattern, of: str) -> str:
    """A call with the tensor ``t``, which has two dimensions, as one argument, and others that fit beside it."""
    letters = pattern.shapes.get(of)
    # As many dimensions as the argument has, and how long each of them is then.
    itself = {None: "t", 2: "t", 1: "t[0]", 3: "t[None]"}[len(letters) if letters else None]
    leading = {1: ["t.shape[1]"], 2: ["t.shape[0]", "t.shape[1]"], 3: ["1", "t.shape[0]", "t.shape[1]"]}
    long = dict(zip(letters, leading[len(letters)], strict=True)) if letters else {}
    long = {"a": "3", "b": "4", "c": "5", "n": "2", **long}
    tensors, others = tensors_of(overload, pattern.given), {}
    for name in tensors:
        sizes = "" if not pattern.shapes else "".join(f", {long[letter]}" for letter in pattern.shapes[name])
        dtype = f", dtype=torch.{pattern.dtypes[name]}" if name in pattern.dtypes else ""
        others[name] = itself if name == of else f"beside(t{sizes}{dtype})"
    tried = {name: described(pattern, name, [3, 4], TRIED) for name in tensors}
    values = values_for(overload, pattern, tried, torch.float32)
    if isinstance(values, dict):
        others |= {name: _literal(value) for name, value in values.items()}
    arguments = [others.get(argument.name, _literal(default)) for argument, default in _with_defaults(overload)]
    return f"({', '.join(arguments)}{',' if len(arguments) == 1 else ''})"
