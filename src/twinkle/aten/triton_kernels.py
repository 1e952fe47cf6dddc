"""Triton programs that move elements between two strided layouts."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_elements(
    to, source, total, sizes, to_strides, source_strides, RANK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """One element per lane, in the order of ``sizes``, whose first dimension varies fastest.

    A program takes every ``num_programs``-th block, so that a grid may be smaller than the work.
    """
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if WIDE:
        first = first.to(tl.int64)
    for start in range(first * BLOCK, total, step * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < total
        rest = index
        at = index * 0
        goes = index * 0
        for d in tl.static_range(RANK - 1):
            i = rest % sizes[d]
            rest = rest // sizes[d]
            at += i * source_strides[d]
            goes += i * to_strides[d]
        at += rest * source_strides[RANK - 1]
        goes += rest * to_strides[RANK - 1]
        value = tl.load(source + at, mask=inside)
        tl.store(to + goes, value.to(to.dtype.element_ty), mask=inside)


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of two dimensions per turn: neighbours lie along rows in the one tensor, along columns in the other.

    The other dimensions, ``batches`` combinations of them, are those of ``sizes``.
    """
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if WIDE:
        first = first.to(tl.int64)
    for turn in range(first, down * across * batches, step):
        row = (turn // batches // across) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (turn // batches % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        rest = turn % batches
        at = row * source_row + column * source_column
        goes = row * to_row + column * to_column
        for d in tl.static_range(RANK):
            i = rest % sizes[d]
            rest = rest // sizes[d]
            at += i * source_strides[d]
            goes += i * to_strides[d]
        value = tl.load(source + at, mask=inside)
        tl.store(to + goes, value.to(to.dtype.element_ty), mask=inside)
