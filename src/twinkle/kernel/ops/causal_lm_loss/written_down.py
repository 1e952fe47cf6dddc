"""What of a model's steps between its head and its loss can be written down."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Cap(NamedTuple):
    """What was done to the numbers: ``inner * z``, or ``outer * tanh(inner * z)``."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> Cap:
        """That, multiplied."""
        return Cap(self.inner * factor) if self.outer is None else Cap(self.inner, self.outer * factor)


def leaves_last_dimension(index: Any, dimensions: int) -> bool:
    """Whether an index takes rows as a whole, so that it means the same for what the head is applied to."""
    items = index if isinstance(index, tuple) else (index,)
    if not items or not all(map(_plain, items)):
        return False
    last = items[-1]
    taken = sum(map(_dimensions_of, items))
    closed = last is Ellipsis or not any(item is Ellipsis for item in items)
    if closed and taken < dimensions:
        return True
    return isinstance(last, slice) and last == slice(None)


def _plain(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, (int, slice, torch.Tensor)) and not isinstance(item, bool))


def _dimensions_of(item: Any) -> int:
    """How many dimensions a part of an index stands for; a mask for several."""
    if item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
