"""A call's arguments, in the order of the operator's schema."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten.numbers import NUMBERS, as_tensor

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensors that are what they say; a subclass may be anything."""

_WORDS = frozenset(
    {int, bool, float, complex, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format}
)
"""What else an argument may be, for its value to say all about it."""


_KINDS: dict[str, type] = {"bool": bool, "float": float}
"""Kinds of numbers, by the schema's name, for which PyTorch takes others too: 1.5 for a bool, a tensor for a float."""


class Arguments:
    """Completes what the dispatcher hands over, which leaves out every argument that equals its default.

    Attributes:
        names: of all, in the schema's order.
        leading: how many tensors, none of which can be left out, the arguments begin with.
    """

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        declared = overload._schema.arguments
        self._defaults = [_default(argument) for argument in declared]
        self.names = tuple(argument.name for argument in declared)
        self._position = {name: i for i, name in enumerate(self.names)}
        self._tensors = [i for i, argument in enumerate(declared) if isinstance(argument.type, torch.TensorType)]
        self._numbers = [(i, _KINDS[kind]) for i, kind in enumerate(map(plain_type, declared)) if kind in _KINDS]
        self._keyword_only = tuple(argument.name for argument in declared if argument.kwarg_only)
        self._positional = len(declared) - len(self._keyword_only)
        self.leading = next((i for i in range(len(declared)) if i not in self._tensors), len(declared))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in the schema's order, defaults filled in."""
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            values[self._position[name]] = value
        return values

    def of_declared_kinds(self, values: list[Any]) -> list[Any]:
        """The same, numbers being of the kinds that the schema declares: 1.5 for a bool is True.

        The dispatcher has seen to that; a direct call has not.
        """
        for place, kind in self._numbers:
            if values[place] is not None:
                values[place] = kind(values[place])
        return values

    def call(self, function: Any, values: list[Any]) -> Any:
        """``function`` called as the operator is: what the schema has after its ``*``, by name."""
        if not self._keyword_only:
            return function(*values)
        by_name = dict(zip(self._keyword_only, values[self._positional :], strict=True))
        return function(*values[: self._positional], **by_name)

    def wrap_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``x.copy_(5)`` hands over a number where the schema has a tensor, which a captured kernel wouldn't take."""
        for place in self._tensors:
            if place < len(args) and type(args[place]) in NUMBERS:
                args = (*args[:place], as_tensor(args[place]), *args[place + 1 :])
        return args

    def has_numbers(self, values: list[Any]) -> bool:
        """Whether one of all arguments is a number where the schema has a tensor."""
        return any(type(values[place]) in NUMBERS for place in self._tensors)


def layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All of a call but the elements of its tensors and where they lie, as a key.

    It holds no pending conjugation or negation, nor what autograd knows. None where a tensor doesn't tell what it is,
    as subclasses and nested ones don't, or an argument is something that no operator of the library has.
    """
    key: list[Any] = []
    try:
        for value in args:
            kind = type(value)
            if kind in PLAIN:
                key += (kind, value.layout, value.dtype, value.device, value.shape, value.stride())
            elif kind in _WORDS:
                key += (kind, value)
            elif kind is list and all(type(number) is int for number in value):
                key.append(tuple(value))
            else:
                return None
    except RuntimeError:  # it has no sizes or strides that it could tell
        return None
    for name, value in kwargs.items():
        if type(value) not in _WORDS:
            return None
        key += (name, type(value), value)
    return tuple(key)


def plain_type(argument: Any) -> str:
    """The type of an argument of a schema by PyTorch's name, whether it may be None or not."""
    name = str(argument.real_type)
    return name.removeprefix("Optional[").removesuffix("]") if name.startswith("Optional[") else name


def is_optional(argument: Any) -> bool:
    """Whether an argument of a schema may be None."""
    return str(argument.type).startswith("Optional[")


def _default(argument: Any) -> Any:
    if not argument.has_default_value():
        return None
    value = argument.default_value
    # The schema holds a memory format's number; the dispatcher hands over the object.
    return _MEMORY_FORMATS[value] if str(argument.real_type) == "MemoryFormat" else value


_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""By PyTorch's own numbers (c10/core/MemoryFormat.h)."""
