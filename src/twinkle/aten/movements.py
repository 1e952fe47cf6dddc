"""How much the order of elements changes in a copy, as words; and copies of each kind, to be timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from twinkle.aten.layouts import filled
from twinkle.aten.routes import Work
from twinkle.aten.strided import plan_of

Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of a copy: sizes, the strides of what is written, those of what is read."""


def movement(
    sizes: tuple[int, ...], to_strides: tuple[int, ...], source_strides: tuple[int, ...], itemsize: int
) -> str:
    """One of :data:`MOVEMENTS`, for elements of so many bytes."""
    order = _order(sizes, to_strides, source_strides, itemsize)
    return order if itemsize < WIDE else WIDE_KIND.format(order)


def _order(sizes: tuple[int, ...], to_strides: tuple[int, ...], source_strides: tuple[int, ...], itemsize: int) -> str:
    """One of :data:`ORDERS`."""
    plan = plan_of(sizes, to_strides, source_strides, itemsize)
    if plan.few > 1:
        return "few together"
    if 0 in plan.source_strides:
        return "broadcast"
    if min(plan.source_strides) < plan.source_strides[0]:
        return "transposed"
    if plan.to_strides[0] > 1 or plan.source_strides[0] > 1:
        return "gaps"
    return "contiguous" if len(plan.sizes) == 1 else "permuted"


def _permuted(elements: int) -> Layout:
    """A batch's heads, before and after what attention does with them."""
    width, heads = 64, 8
    length = max(2, elements // (width * heads))
    return (heads, length, width), (length * width, width, 1), (width, heads * width, 1)


def _matrix(row: int, column: int, elements: int) -> Layout:
    """A square that is read with a row's stride and a column's; in units of a side where they are negative."""
    side = max(2, math.isqrt(elements))
    return (side, side), (side, 1), (row if row >= 0 else -row * side, column if column >= 0 else -column * side)


def _pairs(elements: int) -> Layout:
    """A transposition of complex numbers, part by part."""
    side = max(2, math.isqrt(elements // 2))
    return (side, side, 2), (2 * side, 2, 1), (2, 2 * side, 1)


ORDERS: dict[str, Callable[[int], Layout]] = {
    "contiguous": lambda elements: ((elements,), (1,), (1,)),
    "permuted": _permuted,
    "transposed": functools.partial(_matrix, 1, -1),
    "few together": _pairs,
    "gaps": functools.partial(_matrix, -4, 2),
    "broadcast": functools.partial(_matrix, 1, 0),
}
"""Order -> a copy of about so many elements. Nothing changes; rows stay rows, but lie in another order; neighbours lie
along another dimension; only a few stay neighbours; they don't lie side by side; elements are read more than once."""

WIDE, WIDE_KIND = 8, "wide {}"
"""The bytes of an element from which on a copy is of a kind of its own: there PyTorch's, which moves element by
element, is near what memory allows in nearly every order."""

STILL = ("contiguous", WIDE_KIND.format("contiguous"))
"""The kinds of copies in which nothing changes its place."""

CAST = "cast"
"""The kind of those of them that convert numbers, wide or not."""

MOVEMENTS = ORDERS | {WIDE_KIND.format(order): make for order, make in ORDERS.items()}
"""Kind -> a copy of that order, of about so many elements."""


def converted_to(dtype: torch.dtype) -> torch.dtype:
    """Of which dtype the numbers are that a copy converts to this one, to be timed."""
    return torch.bfloat16 if dtype is torch.float32 else torch.float32


def movement_of_result(self: torch.Tensor, memory_format: torch.memory_format | None) -> str:
    """Of an operator whose result lies in memory as that of ``empty_like``."""
    # A meta tensor, which has no memory, tells how that is.
    meta = torch.empty_strided(self.shape, self.stride(), device="meta")
    to = torch.empty_like(meta, memory_format=memory_format or torch.preserve_format)
    return movement(self.shape, to.stride(), self.stride(), self.itemsize)


def results_in_order(kinds: Collection[str]) -> Work:
    """Of ``clone`` and ``contiguous``: a tensor and a memory format.

    Args:
        kinds: the movements of which the table may tell something.
    """

    def sample(kind: str, elements: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Of that kind where the dtype is as wide as the kind says."""
        sizes, _, strides = MOVEMENTS[kind](elements)
        return filled(1, sizes, strides, dtype, device), torch.contiguous_format

    return Work(kind=movement_of_result, samples={kind: functools.partial(sample, kind) for kind in kinds})
