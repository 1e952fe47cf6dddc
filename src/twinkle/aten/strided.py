"""Copies between any two strided layouts: what ``clone``, ``copy_`` and ``contiguous`` are made of.

Both functions move bits, so that a dtype is no more than its item size. Where the dtypes of the two tensors differ,
:func:`triton_copy` converts numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

CASTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Among these :func:`triton_copy` converts."""

BLOCK = 1024
MOST_PROGRAMS = 65535
"""A grid that every accelerator accepts; what takes more turns loops."""
MORE_PROGRAMS = {"cuda": 2**31 - 1}
"""By type of device: where it accepts a larger grid."""

ROWS_AT_ONCE = 2048
"""Elements per turn of a copy by rows, and per turn of one by tiles, by item size: measured on an H200."""
TILES = {1: (128, 128), 2: (128, 128), 4: (64, 64), 8: (64, 64)}
TILE_WARPS = 8
LEAST_TILE = 16
"""Of fewer neighbours a tile gains nothing."""
FEW = 4
"""So few elements that lie side by side in both tensors make no row: tiles take the dimensions beyond."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: what elements are moved as."""
_WIDEST = 8


class Plan(NamedTuple):
    """How to walk over both tensors of a copy.

    Attributes:
        sizes: of the dimensions, neighbours merged where both tensors allow it. The destination is densest along the
            first; there is at least one.
        to_strides, source_strides: in elements.
        tiled: where tiles pay, the dimension along which the source is densest, and the one along which the destination
            is; else None.
        wide: whether offsets need more than 32 bits.
    """

    sizes: tuple[int, ...]
    to_strides: tuple[int, ...]
    source_strides: tuple[int, ...]
    tiled: tuple[int, int] | None
    wide: bool


@functools.lru_cache(maxsize=4096)
def make_plan(sizes: tuple[int, ...], to_strides: tuple[int, ...], source_strides: tuple[int, ...]) -> Plan:
    """The plan for tensors of these shapes; the destination must not overlap itself."""
    merged: list[tuple[int, int, int]] = []
    for to, source, size in sorted(zip(to_strides, source_strides, sizes, strict=True)):
        if size == 1:
            continue
        if merged:
            inner_to, inner_source, inner = merged[-1]
            if (to, source) == (inner_to * inner, inner_source * inner):
                merged[-1] = inner_to, inner_source, inner * size
                continue
        merged.append((to, source, size))
    to_strides, source_strides, sizes = zip(*(merged or [(1, 1, 1)]), strict=True)
    furthest = max(
        sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        for strides in (to_strides, source_strides)
    )
    wide = max(furthest, math.prod(sizes)) + _MARGIN >= 2**31
    return Plan(sizes, to_strides, source_strides, _tiled(sizes, to_strides, source_strides), wide)


_MARGIN = 2**28
"""Indices of elements beyond the last are computed too, before they are masked."""


def _tiled(
    sizes: tuple[int, ...], to_strides: tuple[int, ...], source_strides: tuple[int, ...]
) -> tuple[int, int] | None:
    """See :class:`Plan`."""
    together = sizes[0] <= FEW and to_strides[0] == source_strides[0] == 1
    first = 1 if together and len(sizes) > 1 else 0
    dense = min(range(first, len(sizes)), key=lambda d: source_strides[d] or math.inf)
    pays = source_strides[dense] < source_strides[first] and min(sizes[first], sizes[dense]) >= LEAST_TILE
    return (dense, first) if pays else None


def most_programs(device: torch.device) -> int:
    """The largest grid of one dimension that the device accepts."""
    return MORE_PROGRAMS.get(device.type, MOST_PROGRAMS)


def triton_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Writes ``source`` into ``to``, by a Triton program.

    Args:
        to: any shape and strides, but no two elements share memory.
        source: the same shape, any strides, on the same device, not overlapping ``to``. Another dtype is converted,
            both being in :data:`CASTS`.
    """
    _copying(to.dtype, source.dtype, to.device, to.shape, to.stride(), source.stride())(to, source)


@functools.lru_cache(maxsize=4096)
def _copying(
    to_dtype: torch.dtype,
    source_dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, ...],
    to_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
) -> Callable[..., None]:
    """The copy between two layouts, as a function of the tensors."""
    layout: tuple[tuple[int, ...], ...] = sizes, to_strides, source_strides
    views: tuple[torch.dtype, ...] = ()
    if to_dtype == source_dtype:
        itemsize = to_dtype.itemsize
        if itemsize > _WIDEST:  # complex128, as pairs
            doubled = ((*(2 * stride for stride in strides), 1) for strides in layout[1:])
            layout = (*sizes, 2), *doubled
        views = (INTEGERS[min(itemsize, _WIDEST)],) * 2
    plan = make_plan(*layout)
    most = most_programs(device)
    if plan.tiled is None:
        return _by_rows(plan, most, views)
    return _by_tiles(plan, most, views, TILES[min(max(to_dtype.itemsize, source_dtype.itemsize), _WIDEST)])


def _by_rows(plan: Plan, most: int, views: tuple[torch.dtype, ...]) -> Callable[..., None]:
    from twinkle.aten import triton_kernels as kernels
    from twinkle.aten.launch import program

    (inner, *others), (to_inner, *to_strides), (source_inner, *source_strides) = plan[:3]
    outer = math.prod(others)
    width = min(_power_of_two(inner), ROWS_AT_ONCE if outer == 1 else ROWS_AT_ONCE // 2)
    height = min(_power_of_two(outer), ROWS_AT_ONCE // width)
    turns = math.ceil(outer / height) * math.ceil(inner / width)
    numbers = inner, outer, to_inner, source_inner
    batch = tuple(others), tuple(to_strides), tuple(source_strides)
    constants = {"RANK": len(others), "WIDE": plan.wide, "ONCE": turns <= most, "OUTER": height, "INNER": width}
    return program(kernels.copy_rows, min(turns, most), *numbers, *batch, views=views, **constants)


def _by_tiles(plan: Plan, most: int, views: tuple[torch.dtype, ...], largest: tuple[int, int]) -> Callable[..., None]:
    from twinkle.aten import triton_kernels as kernels
    from twinkle.aten.launch import program

    assert plan.tiled is not None
    (rows, to_row, source_row), (columns, to_column, source_column) = (
        (plan.sizes[d], plan.to_strides[d], plan.source_strides[d]) for d in plan.tiled
    )
    others = [d for d in range(len(plan.sizes)) if d not in plan.tiled]
    batch = [tuple(of[d] for d in others) for of in plan[:3]]
    batches, area = math.prod(batch[0]), math.prod(largest)
    # A side that is shorter than a tile's leaves more to the other.
    height = min(largest[0], _power_of_two(rows))
    width = min(area // height, _power_of_two(columns))
    height = min(area // width, _power_of_two(rows))
    turns = math.ceil(rows / height) * math.ceil(columns / width) * batches
    numbers = rows, columns, batches, to_row, to_column, source_row, source_column
    constants = {"RANK": len(others), "WIDE": plan.wide, "ONCE": turns <= most, "ROWS": height, "COLUMNS": width}
    return program(kernels.copy_tiles, min(turns, most), *numbers, *batch, views=views, warps=TILE_WARPS, **constants)


def _power_of_two(size: int) -> int:
    """The least that is not below."""
    return 1 << (size - 1).bit_length()


def torch_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Writes ``source`` into ``to``, by PyTorch's ``where``: neither ``clone`` nor ``copy_`` takes part.

    Args:
        to: any shape and strides, but no two elements share memory.
        source: the same shape and dtype, any strides, on the same device, not overlapping ``to``.
    """
    if to.element_size() <= _WIDEST:  # where knows few of the narrower dtypes
        integer = INTEGERS[to.element_size()]
        to, source = to.view(integer), source.view(integer)
    torch.where(_true(), source, source, out=to)


@functools.cache
def _true() -> torch.Tensor:
    return torch.ones((), dtype=torch.bool)


@functools.lru_cache(maxsize=4096)
def may_overlap(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of such a tensor may share memory; False only where it is sure that none do."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill the memory from the first to the last of them, each for itself."""
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return reach + 1 == math.prod(sizes) and not may_overlap(sizes, strides)


def broadcasts(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to the other."""
    if len(sizes) > len(to):
        return False
    return all(size in (1, wanted) for size, wanted in zip(sizes[::-1], to[::-1], strict=False))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one allocation, overlapping or not."""
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]


def takes_format(rank: int, memory_format: torch.memory_format | None) -> bool:
    """Whether a tensor of that rank can have that memory format."""
    needed = {torch.channels_last: 4, torch.channels_last_3d: 5}
    return memory_format is None or needed.get(memory_format, rank) == rank
