"""Functions within wrappers, as ``functools.wraps`` makes them: taken apart, and put around another function.

A wrapper is put around another function by a copy whose closure holds that one. One that doesn't hold what it says that
it wraps can't be, and counts as none.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def undecorated(function: Any) -> Any:
    """What all wrappers around a function come down to; the function itself without any."""
    while (inner := _wrapped(function)) is not None:
        function = inner
    return function


def decorated_as(function: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain`` within the wrappers of a function."""
    inner = _wrapped(function)
    return plain if inner is None else _around(function, inner, decorated_as(inner, plain))


def beneath(function: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` within the outermost wrappers of a method that ask whether they are their class's.

    Such a wrapper does nothing beneath a replacement: the one by which transformers checkpoints layers, from 5.24 on.
    """
    inner = _wrapped(function)
    if inner is None or not _knows_itself(function):
        return replacement
    return _around(function, inner, beneath(inner, replacement))


def _wrapped(function: Any) -> types.FunctionType | None:
    inner, cells = getattr(function, "__wrapped__", None), getattr(function, "__closure__", None) or ()
    return inner if isinstance(inner, types.FunctionType) and any(_holds(cell, inner) for cell in cells) else None


def _knows_itself(wrapper: Any) -> bool:
    return any(_holds(cell, wrapper) for cell in wrapper.__closure__)


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty one
        return False


def _around(wrapper: Any, inner: Any, new: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper once more, around ``new`` instead of ``inner``; where it refers to itself, the copy does."""
    itself = types.CellType()
    instead = {id(inner): types.CellType(new), id(wrapper): itself}
    cells = tuple(
        next((instead[id(value)] for value in (inner, wrapper) if _holds(cell, value)), cell)
        for cell in wrapper.__closure__
    )
    copy = types.FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    itself.cell_contents = copy
    copy.__kwdefaults__ = wrapper.__kwdefaults__
    return functools.update_wrapper(copy, wrapper)
