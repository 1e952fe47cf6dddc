"""The Triton program that moves elements between two strided layouts."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _elements(places, inside, FEW: tl.constexpr, TOGETHER: tl.constexpr, UNIT: tl.constexpr):
    """Offsets of the elements at each of a tile's places, and which of them there are."""
    part = tl.arange(0, TOGETHER)[None, None, :]
    inside = inside[:, :, None]
    if FEW < TOGETHER:
        inside = inside & (part < FEW)
    return places[:, :, None] * UNIT + part, inside


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
    FEW: tl.constexpr,
    TOGETHER: tl.constexpr,
    UNIT: tl.constexpr,
    TURNED: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of two dimensions per turn; ``FEW`` elements lie side by side in both tensors at each of its places.

    The other dimensions, ``batches`` combinations of them, are those of ``sizes``, of which the first varies fastest.
    Strides are in units of ``UNIT`` elements, so that the compiler knows what they are multiples of. ``TOGETHER`` is
    the power of two that is not below ``FEW``. ``TURNED`` says that the source is densest along a tile's rows.

    A grid may be smaller than the work: then each program takes every ``num_programs``-th turn, of which the last may
    lie beyond the work, where nothing is read or written. ``ONCE`` says that it isn't smaller: the compiler drops the
    loop.
    """
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    for i in range(1 if ONCE else tl.cdiv(down * across * batches, tl.num_programs(0))):
        turn = first + i * tl.num_programs(0)
        row = (turn // across % down) * ROWS + tl.arange(0, ROWS)
        column = (turn % across) * COLUMNS + tl.arange(0, COLUMNS)
        batch = turn // across // down
        is_one = batch < batches
        read = source
        written = to
        for d in tl.static_range(RANK):
            index = batch % sizes[d]
            batch = batch // sizes[d]
            read += index * source_strides[d] * UNIT
            written += index * to_strides[d] * UNIT
        if FEW == 1:
            inside = (row < rows)[:, None] & (column < columns)[None, :] & is_one
            at = (row * source_row)[:, None] + (column * source_column)[None, :]
            goes = (row * to_row)[:, None] + (column * to_column)[None, :]
            value = tl.load(read + at, mask=inside)
            tl.store(written + goes, value.to(to.dtype.element_ty), mask=inside)
        else:
            # Of places that lie apart the compiler can't tell along which side of a tile they are nearest: it takes
            # the first, so that is where the densest must be.
            inside = (column < columns)[:, None] & (row < rows)[None, :] & is_one
            goes = (column * to_column)[:, None] + (row * to_row)[None, :]
            to_all, are_written = _elements(goes, inside, FEW, TOGETHER, UNIT)
            if TURNED:
                rows_first = (row < rows)[:, None] & (column < columns)[None, :] & is_one
                at = (row * source_row)[:, None] + (column * source_column)[None, :]
                from_all, are_read = _elements(at, rows_first, FEW, TOGETHER, UNIT)
                value = tl.permute(tl.load(read + from_all, mask=are_read), (1, 0, 2))
            else:
                at = (column * source_column)[:, None] + (row * source_row)[None, :]
                from_all, are_read = _elements(at, inside, FEW, TOGETHER, UNIT)
                value = tl.load(read + from_all, mask=are_read)
            tl.store(written + to_all, value.to(to.dtype.element_ty), mask=are_written)
