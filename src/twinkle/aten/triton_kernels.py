"""Triton programs that move elements between two strided layouts.

A grid may be smaller than the work: then each program takes every ``num_programs``-th turn, of which the last may lie
beyond the work, where nothing is read or written. ``ONCE`` says that it isn't smaller: the compiler drops the loop.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    to,
    source,
    inner,
    outer,
    to_inner,
    source_inner,
    sizes,
    to_strides,
    source_strides,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """Of ``OUTER`` rows ``INNER`` elements per turn. A row is the dimension that varies fastest.

    The other dimensions, ``outer`` combinations of them, are those of ``sizes``.
    """
    across = tl.cdiv(inner, INNER)
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    for i in range(1 if ONCE else tl.cdiv(tl.cdiv(outer, OUTER) * across, tl.num_programs(0))):
        turn = first + i * tl.num_programs(0)
        row = (turn // across) * OUTER + tl.arange(0, OUTER)[:, None]
        column = (turn % across) * INNER + tl.arange(0, INNER)[None, :]
        at, goes = _offsets(row, sizes, to_strides, source_strides, RANK)
        inside = (row < outer) & (column < inner)
        value = tl.load(source + at + column * source_inner, mask=inside)
        tl.store(to + goes + column * to_inner, value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def copy_tiles(
    to,
    source,
    rows,
    columns,
    batches,
    to_row,
    to_column,
    source_row,
    source_column,
    sizes,
    to_strides,
    source_strides,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of two dimensions per turn: neighbours lie along columns in the one tensor, along rows in the other.

    The other dimensions, ``batches`` combinations of them, are those of ``sizes``.
    """
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    for i in range(1 if ONCE else tl.cdiv(tl.cdiv(rows, ROWS) * across * batches, tl.num_programs(0))):
        turn = first + i * tl.num_programs(0)
        row = (turn // batches // across) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (turn // batches % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, goes = _offsets(turn % batches, sizes, to_strides, source_strides, RANK)
        inside = (row < rows) & (column < columns)
        value = tl.load(source + at + row * source_row + column * source_column, mask=inside)
        tl.store(to + goes + row * to_row + column * to_column, value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _offsets(index, sizes, to_strides, source_strides, RANK: tl.constexpr):
    """Where the index-th combination of dimensions lies in both tensors; the first of ``sizes`` varies fastest."""
    at = index * 0
    goes = index * 0
    for d in tl.static_range(RANK):
        i = index % sizes[d]
        index = index // sizes[d]
        at += i * source_strides[d]
        goes += i * to_strides[d]
    return at, goes
