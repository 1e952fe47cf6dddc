"""Which operator a new package is for, and what its schema says."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten import catalog
from twinkle.aten.arguments import is_optional, plain_type
from twinkle.aten.errors import RegistrationError
from twinkle.aten.gradients import decomposition
from twinkle.aten.keys import is_dispatched
from twinkle.reasons import did_you_mean

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
        raise RegistrationError.of(name, "unknown-operator", f"PyTorch has no aten::{name}{did_you_mean(name, known)}")
    every = [getattr(packet, each) for each in packet.overloads()]
    overloads = [each for each in every if is_dispatched(each)]
    wanted = None if schema is None else schema.removeprefix("aten::").strip()
    if not overloads or any(text_of(each) == wanted for each in every if each not in overloads):
        raise RegistrationError.of(name, "kind", "PyTorch's dispatcher doesn't know it: it exists in TorchScript only")
    fitting = {text_of(each): each for each in overloads if _makes_one_tensor(each)}
    if not fitting:
        text = "it makes no new tensor, or several, or takes none by itself"
        raise RegistrationError.of(name, "kind", text, "begin with a copy of ops/copy_ or ops/item")
    listed = "".join(f"\n  {text}" for text in fitting)
    if wanted is not None:
        overload = fitting.get(wanted)
        if overload is None:
            text = f"no overload that makes one new tensor has this schema; there are:{listed}"
            raise RegistrationError.of(name, "schema", text)
    else:
        default = [each for each in fitting.values() if each._overloadname == "default"] or list(fitting.values())
        if len(default) > 1:
            raise RegistrationError.of(name, "schema", f"pass one of its overloads as --schema:{listed}")
        (overload,) = default
    for argument in overload._schema.arguments:
        if plain_type(argument) not in TYPES:
            text = f"its argument {argument.name} is of the type {argument.type}; known: {', '.join(TYPES)}"
            raise RegistrationError.of(name, "kind", text)
    return overload


def check_free(name: str) -> None:
    """Whether an operator may be made anew.

    Raises:
        RegistrationError: an installed distribution brings it: with a second one it could be had from neither.
    """
    where = catalog.brought_by(name)
    if where is not None:
        text = f"there is one already, and two can't be told apart: {where}"
        raise RegistrationError.of(name, "exists", text, "edit that one")


def is_taken_apart(overload: torch._ops.OpOverload) -> bool:
    """Whether PyTorch can make an operator of others."""
    return decomposition(overload) is not overload


def text_of(overload: torch._ops.OpOverload) -> str:
    """Its schema as PyTorch prints it, without ``aten::``."""
    return str(overload._schema).removeprefix("aten::")


def _makes_one_tensor(overload: torch._ops.OpOverload) -> bool:
    schema = overload._schema
    new = [str(each.type) for each in schema.returns] == ["Tensor"] and schema.returns[0].alias_info is None
    takes = any(map(is_given_tensor, schema.arguments))
    return takes and new and not schema.is_mutable


def is_given_tensor(argument: Any) -> bool:
    """Whether it is a tensor at each call."""
    return plain_type(argument) == "Tensor" and not is_optional(argument)
