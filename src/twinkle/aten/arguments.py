"""A call's arguments, in the order of the operator's schema."""

from __future__ import annotations

from typing import Any

import torch

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Python's numbers, a bool before the int that it is as well, and the dtypes that PyTorch makes tensors of them in."""


class Arguments:
    """Completes what the dispatcher hands over, which leaves out every argument that equals its default."""

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        declared = overload._schema.arguments
        self._defaults = [_default(argument) for argument in declared]
        self._position = {argument.name: i for i, argument in enumerate(declared)}
        self._is_tensor = [isinstance(argument.type, torch.TensorType) for argument in declared]
        self._keyword_only = tuple(argument.name for argument in declared if argument.kwarg_only)
        self._positional = len(declared) - len(self._keyword_only)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in the schema's order, defaults filled in."""
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            values[self._position[name]] = value
        return values

    def call(self, function: Any, values: list[Any]) -> Any:
        """``function`` called as the operator is: what the schema has after its ``*``, by name."""
        by_name = dict(zip(self._keyword_only, values[self._positional :], strict=True))
        return function(*values[: self._positional], **by_name)

    def wrap_numbers(self, args: tuple[Any, ...]) -> list[Any]:
        """``x.copy_(5)`` hands over a number where the schema has a tensor, which a captured kernel wouldn't take."""
        pairs = zip(args, self._is_tensor, strict=False)
        return [_tensor_of(value) if is_tensor else value for value, is_tensor in pairs]


def _tensor_of(value: Any) -> Any:
    dtype = next((dtype for kind, dtype in NUMBERS.items() if isinstance(value, kind)), None)
    return value if dtype is None else torch.tensor(value, dtype=dtype)


def _default(argument: Any) -> Any:
    if not argument.has_default_value():
        return None
    value = argument.default_value
    # The schema holds a memory format's number; the dispatcher hands over the object.
    return _MEMORY_FORMATS[value] if str(argument.real_type) == "MemoryFormat" else value


_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""By PyTorch's own numbers (c10/core/MemoryFormat.h)."""
