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

from twinkle.aten.launch import most_programs, program
from twinkle.aten.layouts import span

CASTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Among these :func:`triton_copy` converts."""

AREA, AREA_WARPS = 2048, 4
"""Elements of a tile whose rows are dense in both tensors, and warps for one."""
TRANSPOSING = {
    1: ((256, 128, 16), (64, 64, 2)),
    2: ((128, 128, 8), (64, 128, 8)),
    4: ((64, 64, 8), (32, 128, 16)),
    8: ((64, 64, 8), (64, 64, 8)),
    16: ((32, 32, 4), (32, 128, 2)),
}
"""Bytes at a place -> a tile's rows, along which the source is dense, its columns, along which the destination is, and
warps: where each of them begins at a multiple of 16 bytes, and where not. As measured on an H200 by
``python -m benchmarks.tune_copies``, as is :data:`PACKED`."""
PACKED = {1: (256, 64, 8), 2: (128, 128, 16)}
"""The same of tiles that begin anywhere and are written as words of :data:`PACK` elements: a quarter of the stores, and
fewer sectors of memory that are written in part."""
PACK = 4
"""Elements of such a word."""
PACKING = ("cuda", "cpu")
"""The types of devices on which words are written: GPUs, measured on NVIDIA's alone, and Triton's interpreter. It was
never tried on others."""
LEAST = 16
"""Of fewer neighbours no tile is made."""
MOST_FEW = 4
"""So many elements that lie side by side in both tensors are moved together, not as a tile's rows."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: what elements are moved as."""
_WIDEST = 8


class Plan(NamedTuple):
    """How to walk over both tensors of a copy.

    Attributes:
        sizes: of the dimensions, neighbours merged where both tensors allow it. The destination is densest along the
            first; there is at least one.
        to_strides, source_strides: in elements.
        few: how many elements lie side by side in both tensors, where they are too few for a row; they are no dimension
            then. Else 1.
        rows: the dimension along which a tile has rows, the first being the other; None where there is no other.
        transposing: whether ``rows`` is where the source is densest, and not the first.
        wide: whether offsets need more than 32 bits.
    """

    sizes: tuple[int, ...]
    to_strides: tuple[int, ...]
    source_strides: tuple[int, ...]
    few: int
    rows: int | None
    transposing: bool
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
    few = 1
    if len(merged) > 1 and merged[0][:2] == (1, 1) and merged[0][2] <= MOST_FEW:
        few = merged.pop(0)[2]
    to_strides, source_strides, sizes = zip(*(merged or [(1, 1, 1)]), strict=True)
    furthest = few + max(span(sizes, to_strides), span(sizes, source_strides))
    wide = max(furthest, few * math.prod(sizes)) + _MARGIN >= 2**31
    return Plan(sizes, to_strides, source_strides, few, *_rows(sizes, source_strides), wide)


_MARGIN = 2**28
"""Rows, columns and turns beyond the last are counted too, before they are masked. Their offsets may overflow: nobody
reads or writes there."""


def _rows(sizes: tuple[int, ...], source_strides: tuple[int, ...]) -> tuple[int | None, bool]:
    """``rows`` and ``transposing`` of a :class:`Plan`."""
    others = range(1, len(sizes))
    if not others:
        return None, False
    dense = min(others, key=lambda d: source_strides[d] or math.inf)
    if 0 < source_strides[dense] < source_strides[0] and min(sizes[0], sizes[dense]) >= LEAST:
        return dense, True
    return next((d for d in others if sizes[d] >= LEAST), max(others, key=lambda d: sizes[d])), False


def plan_of(
    sizes: tuple[int, ...], to_strides: tuple[int, ...], source_strides: tuple[int, ...], itemsize: int
) -> Plan:
    """The plan for elements of so many bytes; those that are wider than any integer are moved as pairs."""
    if itemsize > _WIDEST:
        pairs = ((*(2 * stride for stride in strides), 1) for strides in (to_strides, source_strides))
        return make_plan((*sizes, 2), *pairs)
    return make_plan(sizes, to_strides, source_strides)


def triton_copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Writes ``source`` into ``to``, by a Triton program, and returns ``to``.

    Args:
        to: any shape and strides, but no two elements share memory.
        source: the same shape, any strides, on the same device, not overlapping ``to``. Another dtype is converted,
            both being in :data:`CASTS`.
    """
    _copying(to.dtype, source.dtype, to.device, to.shape, to.stride(), source.stride())(to, source)
    return to


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
    from twinkle.aten.triton_kernels import copy_tiles

    itemsize = max(to_dtype.itemsize, source_dtype.itemsize)
    views = (INTEGERS[min(itemsize, _WIDEST)],) * 2 if to_dtype == source_dtype else ()
    plan = plan_of(sizes, to_strides, source_strides, itemsize)
    together = _power_of_two(plan.few)
    packs = bool(views) and device.type in PACKING and _may_pack(plan, itemsize)
    height, width, warps = _tile(plan, min(itemsize, _WIDEST), together, packs)
    unit = math.gcd(plan.few, *plan.to_strides, *plan.source_strides)
    to_units, source_units = (tuple(stride // unit for stride in of) for of in (plan.to_strides, plan.source_strides))
    walked = plan.sizes, to_units, source_units
    (columns, rows), (to_column, to_row), (source_column, source_row) = (
        (of[0], 1 if plan.rows is None else of[plan.rows]) for of in walked
    )
    batch = [tuple(of[d] for d in range(1, len(plan.sizes)) if d != plan.rows) for of in walked]
    batches, most = math.prod(batch[0]), most_programs(device)
    pack = PACK if packs else 1
    turns = math.ceil(rows / height) * math.ceil((columns + pack - 1) / width) * batches
    constants = {
        "RANK": len(batch[0]),
        "FEW": plan.few,
        "TOGETHER": together,
        "UNIT": unit,
        "TURNED": plan.transposing,
        "PACK": pack,
        "WIDE": plan.wide,
        "ONCE": turns <= most,
        "ROWS": height,
        "COLUMNS": width,
    }
    numbers = rows, columns, batches, to_row, to_column, source_row, source_column
    return program(copy_tiles, min(turns, most), *numbers, *batch, views=views, warps=warps, **constants)


def _tile(plan: Plan, itemsize: int, together: int, packs: bool) -> tuple[int, int, int]:
    """Rows and columns of a plan's tiles, powers of two, with so many elements at each place; and the warps for one."""
    columns, rows = _power_of_two(plan.sizes[0]), 1 if plan.rows is None else _power_of_two(plan.sizes[plan.rows])
    if not plan.transposing:
        # Two rows at least, where there are: of an element that a row repeats, one row at a time is slower.
        area = AREA // together
        width = min(columns, area // min(rows, 2))
        return min(rows, area // width), width, AREA_WARPS
    at_a_place = min(itemsize * together, max(TRANSPOSING))
    height, width, warps = PACKED[itemsize] if packs else TRANSPOSING[at_a_place][_is_ragged(plan, itemsize)]
    area = height * width
    # A side that is shorter than a tile's leaves more to the other.
    height = min(height, rows)
    width = min(area // height, columns)
    return min(area // width, rows), width, warps


def _may_pack(plan: Plan, itemsize: int) -> bool:
    """Whether several elements of a copy that only moves bits may be written at once."""
    lie_together = plan.transposing and plan.few == 1 and plan.to_strides[0] == 1
    return lie_together and itemsize in PACKED and _is_ragged(plan, itemsize)


def _is_ragged(plan: Plan, itemsize: int) -> bool:
    """Whether strides along the sides of a transposing plan's tiles are no multiples of 16 bytes; where its tensors
    begin isn't asked."""
    assert plan.rows is not None
    return any(stride * itemsize % 16 for stride in (plan.to_strides[plan.rows], plan.source_strides[0]))


def _power_of_two(size: int) -> int:
    """The least that is not below."""
    return 1 << (size - 1).bit_length()


def torch_copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Writes ``source`` into ``to``, by PyTorch's ``where``, and returns ``to``: neither ``clone`` nor ``copy_`` takes
    part.

    Args:
        to: any shape and strides, but no two elements share memory.
        source: the same shape and dtype, any strides, on the same device, not overlapping ``to``.
    """
    written = to
    if to.element_size() <= _WIDEST:  # where knows few of the narrower dtypes
        integer = INTEGERS[to.element_size()]
        written, source = to.view(integer), source.view(integer)
    torch.where(_true(), source, source, out=written)
    return to


@functools.cache
def _true() -> torch.Tensor:
    return torch.ones((), dtype=torch.bool, device="cpu")  # PyTorch takes it beside tensors on any device
