"""Making the package of a new operator, from the files in ``templates/operator``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from string import Template
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.errors import RegistrationError
from twinkle.aten.shipped import shipped
from twinkle.reasons import Reason, did_you_mean

_SUFFIX = ".template"

TYPES = {
    "Tensor": "torch.Tensor",
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
    "number": "float",
    "str": "str",
    "List[int]": "Sequence[int]",
    "List[SymInt]": "Sequence[int]",
    "List[float]": "Sequence[float]",
    "ScalarType": "torch.dtype",
    "Layout": "torch.layout",
    "Device": "torch.device",
    "MemoryFormat": "torch.memory_format",
    "Generator": "torch.Generator",
}
"""PyTorch's names of an argument's type, and Python's."""

_REQUIRED = {"int": 1, "float": 0.5, "bool": False, "str": "none", "Sequence[int]": [1], "Sequence[float]": [1.0]}
"""What a case gives for an argument without a default that is no tensor."""

_TENSORS = {
    "contiguous": "{shape: [3, 1050]}",
    "transposed": "{shape: [33, 50], strides: [1, 33], offset: 3}",
    "gaps": "{shape: [5, 7, 3], strides: [64, 8, 2], offset: 1}",
    "scalar": "{shape: []}",
    "zeros": "{shape: [4, 9], values: zeros}",
    "special": "{shape: [7, 31], values: special}",
    "small": "{shape: [3, 4], strides: [1, 3]}",
}
"""By case."""

_TIMED = {
    "accelerator": "{shape: [16384, 16384]}",
    "cpu": "{shape: [1024, 2048]}",
    "quick": "{shape: [3, 1050]}",
    "few": "{shape: [64]}",
}
"""By size of what is timed."""


def overload_of(name: str, schema: str | None) -> torch._ops.OpOverload:
    """The operator in the running PyTorch.

    Args:
        name: the operator's, without ``aten::``.
        schema: as PyTorch prints it, with or without ``aten::``; its default overload's when left out.

    Raises:
        RegistrationError: there is no such operator, it has another schema, or it is of a kind that the template can't
            be made for.
    """
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        known = [found.removeprefix("aten::").partition(".")[0] for found in torch._C._dispatch_get_all_op_names()]
        raise _error(name, "unknown-operator", f"PyTorch has no aten::{name}{did_you_mean(name, known)}")
    overloads = [getattr(packet, each) for each in packet.overloads()]
    fitting = {_text(each): each for each in overloads if _makes_one_tensor(each)}
    if not fitting:
        raise _error(name, "kind", "it makes no new tensor, or several", "begin with a copy of ops/copy_ or ops/item")
    listed = "".join(f"\n  {text}" for text in fitting)
    if schema is not None:
        overload = fitting.get(schema.removeprefix("aten::").strip())
        if overload is None:
            raise _error(name, "schema", f"no overload that makes one new tensor has this schema; there are:{listed}")
    else:
        default = [each for each in fitting.values() if each._overloadname == "default"] or list(fitting.values())
        if len(default) > 1:
            raise _error(name, "schema", f"pass one of its overloads as --schema:{listed}")
        (overload,) = default
    for argument in overload._schema.arguments:
        if _plain_type(argument) not in TYPES:
            text = f"its argument {argument.name} is of the type {argument.type}; known: {', '.join(TYPES)}"
            raise _error(name, "kind", text)
    return overload


def _text(overload: torch._ops.OpOverload) -> str:
    return str(overload._schema).removeprefix("aten::")


def _makes_one_tensor(overload: torch._ops.OpOverload) -> bool:
    schema = overload._schema
    takes = any(_plain_type(each) == "Tensor" and not _is_optional(each) for each in schema.arguments)
    return takes and [str(each.type) for each in schema.returns] == ["Tensor"] and not schema.is_mutable


def make(overload: torch._ops.OpOverload, folder: Path) -> Path:
    """Writes an operator's package into a new folder of its name.

    Args:
        overload: see :func:`overload_of`.
        folder: that of the other operators.

    Returns:
        The package.

    Raises:
        RegistrationError: the folder is there already.
    """
    name = overload._schema.name.removeprefix("aten::")
    package = folder / name
    if package.exists():
        raise _error(name, "exists", f"{package} is there already", "remove it, or edit it")
    values = _values(name, overload)
    templates = shipped("template")
    for file in sorted(templates.rglob(f"*{_SUFFIX}")):
        target = package / file.relative_to(templates).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(file.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    return package


def add_entry_point(name: str, project: Path) -> str:
    """Names the operator in a ``pyproject.toml``, if that lists operators, and it isn't there yet; the line."""
    line = f'{name} = "ops.{name}.register:SPEC"'
    text = project.read_text(encoding="utf-8")
    head, section, rest = text.partition('[project.entry-points."twinkle.aten_ops"]\n')
    if section and line not in rest:
        lines, _, after = rest.partition("\n\n")
        listed = "\n".join(sorted([*lines.splitlines(), line]))
        project.write_text(f"{head}{section}{listed}\n\n{after}", encoding="utf-8")
    return line


def _values(name: str, overload: torch._ops.OpOverload) -> dict[str, str]:
    declared = overload._schema.arguments
    schema = _text(overload)
    parameters = [_parameter(argument, default) for argument, default in _with_defaults(overload)]
    if any(argument.kwarg_only for argument in declared):
        parameters.insert(next(i for i, argument in enumerate(declared) if argument.kwarg_only), "*")
    signature = ", ".join(parameters)
    if len(signature) > 80:
        signature = "\n    " + ",\n    ".join(parameters) + ",\n"
    arguments = ", ".join(f"{a.name}={a.name}" if a.kwarg_only else a.name for a in declared)
    path = f"{name}.{overload._overloadname}"
    lists = "\nfrom collections.abc import Sequence" if "Sequence[" in signature else ""
    conditions = "\n".join(_conditions(overload))
    return {
        "name": name,
        "imported": ", ".join(sorted([f"{name}_aten", "register_a1"])),
        "one_line": schema,
        "schema": _schema(schema),
        "torch": "\nimport torch\n" if "torch." in conditions else "",
        "signature": signature,
        "arguments": arguments,
        "overload": path,
        "call": f"{path}({arguments})",
        "sequences": lists,
        "sequences_before_torch": f"{lists}\n" if lists else "",
        "conditions": conditions,
        **{case: _case(overload, described, "      ", "\n") for case, described in _TENSORS.items()},
        **{size: _case(overload, described, "", ", ") for size, described in _TIMED.items()},
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


def _plain_type(argument: Any) -> str:
    name = str(argument.real_type)
    return name.removeprefix("Optional[").removesuffix("]") if name.startswith("Optional[") else name


def _is_optional(argument: Any) -> bool:
    return str(argument.type).startswith("Optional[")


def _parameter(argument: Any, default: Any) -> str:
    kind = TYPES[_plain_type(argument)] + (" | None" if _is_optional(argument) else "")
    return f"{argument.name}: {kind}" + (f" = {_literal(default)}" if argument.has_default_value() else "")


def _literal(value: Any) -> str:
    """A value as Python source, text in double quotes unless it has some."""
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def _conditions(overload: torch._ops.OpOverload) -> list[str]:
    """A tensor's own, for each that is always given, and the dtypes that the template's kernel is right for."""
    given = [
        (i, argument.name)
        for i, argument in enumerate(overload._schema.arguments)
        if _plain_type(argument) == "Tensor" and not _is_optional(argument)
    ]
    lines = []
    for place, name in given:
        lines.append(f'        *tensor({place}, "{name}", lambda t: {_call(overload, place)}),')
    first = given[0][0]
    return [*lines, f"        floating({first}, lambda t: {_call(overload, first)}),"]


def _call(overload: torch._ops.OpOverload, place: int) -> str:
    """A call with the tensor ``t`` in one place, and others of its kind beside it."""
    values = []
    for i, (argument, default) in enumerate(_with_defaults(overload)):
        if i == place:
            values.append("t")
        elif _plain_type(argument) == "Tensor" and not _is_optional(argument):
            values.append("torch.ones(t.shape, dtype=t.dtype, device=t.device)")
        else:
            value = default if argument.has_default_value() else _REQUIRED[TYPES[_plain_type(argument)]]
            values.append(_literal(value))
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def _case(overload: torch._ops.OpOverload, described: str, indent: str, between: str) -> str:
    """The arguments that have no defaults, as YAML."""
    lines = []
    for argument in overload._schema.arguments:
        if argument.has_default_value():
            continue
        kind = TYPES[_plain_type(argument)]
        value = described if kind == "torch.Tensor" else str(_REQUIRED[kind]).lower()
        lines.append(f"{indent}{argument.name}: {value}")
    return between.join(lines)


def _error(name: str, code: str, text: str, hint: str | None = None) -> RegistrationError:
    return RegistrationError(name, Reason(code, text, hint))
