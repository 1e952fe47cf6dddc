"""The Triton program that moves elements between two strided layouts."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


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
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of two dimensions per turn; ``FEW`` elements lie side by side in both tensors at each of its places.

    The other dimensions, ``batches`` combinations of them, are those of ``sizes``, of which the first varies fastest.
    Strides are in units of ``UNIT`` elements, so that the compiler knows what they are multiples of. ``TOGETHER`` is
    the power of two that is not below ``FEW``. ``TURNED`` says that the source is densest along a tile's rows. ``PACK``
    elements are written as one word, where that isn't 1.

    A grid may be smaller than the work: then each program takes every ``num_programs``-th turn, of which the last may
    lie beyond the work, where nothing is read or written. ``ONCE`` says that it isn't smaller: the compiler drops the
    loop.
    """
    # Not by tl.cdiv: the sum that it makes is beyond 32 bits where a side is almost.
    down = (rows - 1) // ROWS + 1
    across = (columns - 1) // COLUMNS + 1
    if PACK > 1:
        across += ((columns - 1) % COLUMNS + PACK - 1) // COLUMNS
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    for i in range(1 if ONCE else tl.cdiv(down * across * batches, tl.num_programs(0))):
        turn = first + i * tl.num_programs(0)
        row = (turn // across % down) * ROWS
        column = (turn % across) * COLUMNS
        batch = turn // across // down
        is_one = batch < batches
        read = source
        written = to
        for d in tl.static_range(RANK):
            index = batch % sizes[d]
            batch = batch // sizes[d]
            read += index * source_strides[d] * UNIT
            written += index * to_strides[d] * UNIT
        if PACK > 1:
            _packed(
                written,
                read,
                row,
                column,
                rows,
                columns,
                to_row,
                source_row,
                source_column,
                is_one,
                PACK,
                ROWS,
                COLUMNS,
            )
        else:
            row += tl.arange(0, ROWS)
            column += tl.arange(0, COLUMNS)
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


@triton.jit
def _elements(places, inside, FEW: tl.constexpr, TOGETHER: tl.constexpr, UNIT: tl.constexpr):
    """Offsets of the elements at each of a tile's places, and which of them there are."""
    part = tl.arange(0, TOGETHER)[None, None, :]
    inside = inside[:, :, None]
    if FEW < TOGETHER:
        inside = inside & (part < FEW)
    return places[:, :, None] * UNIT + part, inside


@triton.jit
def _packed(
    to,
    source,
    row,
    column,
    rows,
    columns,
    to_row,
    source_row,
    source_column,
    is_one,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The tile that begins at a row and a column, written in words of ``PACK`` elements, which lie side by side there.

    A row may begin within a word; then its words begin up to ``PACK - 1`` elements before the tile's columns. How many
    is the same in every ``PACK``-th row, so that a tile has four dimensions: the group of ``PACK`` rows, the row of the
    group, the word of the row, the element of the word. A word that reaches over an end of its row is written element
    by element.
    """
    BITS: tl.constexpr = to.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if PACK * BITS == 64 else tl.uint32
    ELEMENT: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint8
    part = tl.arange(0, PACK)
    # A tile's first row is a multiple of PACK, so that it begins in a word where the first of all does.
    before = ((to.to(tl.int64) // (BITS // 8) + part * to_row) % PACK).to(tl.int32)
    word = column - before[:, None] + (tl.arange(0, COLUMNS // PACK) * PACK)[None, :]
    at_column = word[:, :, None] + part[None, None, :]
    at_row = row + (tl.arange(0, ROWS // PACK) * PACK)[:, None] + part[None, :]
    are_rows = (at_row < rows) & is_one
    inside = are_rows[:, :, None, None] & ((at_column >= 0) & (at_column < columns))[None, :, :, :]
    read = (source + at_row * source_row)[:, :, None, None] + (at_column * source_column)[None, :, :, :]
    value = tl.load(read, mask=inside, other=0)
    shifted = value.to(ELEMENT, bitcast=True).to(WORD) << (part * BITS).to(WORD)[None, None, None, :]
    is_whole = (word >= 0) & (word + PACK <= columns)
    to_rows = to + at_row * to_row
    words = (to_rows + (column - before)[None, :]).to(tl.pointer_type(WORD))
    words = words[:, :, None] + tl.arange(0, COLUMNS // PACK)[None, None, :]
    tl.store(words, tl.sum(shifted, axis=3), mask=are_rows[:, :, None] & is_whole[None, :, :])
    if (column == 0) | (column + COLUMNS > columns):  # else there is none such
        torn = inside & (is_whole == 0)[None, :, :, None]
        tl.store(to_rows[:, :, None, None] + at_column[None, :, :, :], value, mask=torn)
