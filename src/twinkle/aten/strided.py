"""Copies between any two strided layouts: what ``clone``, ``copy_`` and ``contiguous`` are made of.

Both functions move bits, so that a dtype is no more than its item size. Where the dtypes of the two tensors differ,
:func:`triton_copy` converts numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

CASTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Among these :func:`triton_copy` converts."""

BLOCK = 1024
TILE = 32
MOST_PROGRAMS = 65535
"""A grid that every accelerator accepts; larger copies loop."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: what elements are moved as."""
_WIDEST = 8


class Plan(NamedTuple):
    """How to walk over both tensors of a copy.

    Attributes:
        sizes: of the dimensions, neighbours merged where both tensors allow it. The destination is densest along the
            first; there is at least one.
        to_strides, source_strides: in elements.
        tiled: the dimension along which the source is densest, where tiles pay; else 0.
        wide: whether offsets need more than 32 bits.
    """

    sizes: tuple[int, ...]
    to_strides: tuple[int, ...]
    source_strides: tuple[int, ...]
    tiled: int
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
    dense = min(range(len(sizes)), key=lambda d: source_strides[d] or math.inf)
    pays = source_strides[dense] < source_strides[0] and min(sizes[0], sizes[dense]) >= TILE // 2
    furthest = max(
        sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        for strides in (to_strides, source_strides)
    )
    wide = max(furthest, math.prod(sizes)) + MOST_PROGRAMS * BLOCK >= 2**31
    return Plan(sizes, to_strides, source_strides, dense if pays else 0, wide)


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
    from twinkle.aten import triton_kernels as kernels
    from twinkle.aten.launch import program

    layout: tuple[tuple[int, ...], ...] = sizes, to_strides, source_strides
    views: tuple[torch.dtype, ...] = ()
    if to_dtype == source_dtype:
        itemsize = to_dtype.itemsize
        if itemsize > _WIDEST:  # complex128, as pairs
            doubled = ((*(2 * stride for stride in strides), 1) for strides in layout[1:])
            layout = (*sizes, 2), *doubled
        views = (INTEGERS[min(itemsize, _WIDEST)],) * 2
    sizes, to_strides, source_strides, tiled, wide = make_plan(*layout)
    constants: dict[str, Any] = {"WIDE": wide}
    if not tiled:
        total = math.prod(sizes)
        grid = min(math.ceil(total / BLOCK), MOST_PROGRAMS)
        constants |= {"RANK": len(sizes), "BLOCK": BLOCK}
        walk = total, sizes, to_strides, source_strides
        return program(kernels.copy_elements, grid, *walk, views=views, **constants)
    tile = [(sizes[d], to_strides[d], source_strides[d]) for d in (tiled, 0)]
    others = [d for d in range(len(sizes)) if d not in (tiled, 0)]
    batch = [tuple(of[d] for d in others) for of in (sizes, to_strides, source_strides)]
    batches = math.prod(batch[0])
    (rows, columns), *tile_strides = zip(*tile, strict=True)
    grid = min(math.ceil(rows / TILE) * math.ceil(columns / TILE) * batches, MOST_PROGRAMS)
    constants |= {"RANK": len(others), "ROWS": TILE, "COLUMNS": TILE}
    numbers = (rows, columns, batches, *tile_strides[0], *tile_strides[1])
    return program(kernels.copy_tiles, grid, *numbers, *batch, views=views, **constants)


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
