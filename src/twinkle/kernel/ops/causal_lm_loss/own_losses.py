"""Whether a loss of the user's own asks what kind of object its logits are.

Pending logits are no tensors and can't pass themselves off as some: PyTorch's C++ believes what ``__class__`` says too,
and then reads memory that isn't a tensor's. So a loss that might take another branch for them gets logits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from twinkle.naming import top_package

_QUESTIONS = {"isinstance", "is_tensor"}
_KNOWN = ("torch", "transformers", "twinkle")
"""Packages whose functions don't ask, or ask it of what isn't logits."""


def may_ask_what_they_are(loss: Any) -> bool:
    """Whether a loss might; a compiler can have the code of functions alone looked at."""
    if is_compiling() and loss is not None and not isinstance(loss, types.FunctionType):
        return True
    return _asks_what_they_are(loss)


@torch.compiler.assume_constant_result
def _asks_what_they_are(loss: Any) -> bool:
    """Whether the code of a loss, or of functions that it names, asks for the type of anything."""
    waiting, seen = [loss], set()
    while waiting:
        function = _function(waiting.pop())
        if function is None or function in seen or top_package(function.__module__) in _KNOWN:
            continue
        seen.add(function)
        for code in _codes(function.__code__):
            if not _QUESTIONS.isdisjoint(code.co_names):
                return True
            waiting += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        waiting += _enclosed(function)
    return False


def _function(value: Any) -> types.FunctionType | None:
    """What runs when something is called; None for what isn't written in Python."""
    if isinstance(value, functools.partial):
        return _function(value.func)
    if isinstance(value, nn.Module):
        return _function(value.forward)
    if not callable(value):
        return None
    value = inspect.unwrap(getattr(value, "__func__", value))
    value = value if isinstance(value, types.FunctionType) else type(value).__call__
    return value if isinstance(value, types.FunctionType) else None


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    """What a function uses of those around it; a cell is empty until there is something."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
