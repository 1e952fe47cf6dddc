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
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of two dimensions per turn; ``FEW`` elements lie side by side in both tensors at each of its places.

    The other dimensions, ``batches`` combinations of them, are those of ``sizes``, of which the first varies fastest.

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
        row = (turn // across % down) * ROWS + tl.arange(0, ROWS)[:, None]
        column = (turn % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        batch = turn // across // down
        inside = (row < rows) & (column < columns) & (batch < batches)
        at = row * source_row + column * source_column
        goes = row * to_row + column * to_column
        for d in tl.static_range(RANK):
            index = batch % sizes[d]
            batch = batch // sizes[d]
            at += index * source_strides[d]
            goes += index * to_strides[d]
        for one in tl.static_range(FEW):
            value = tl.load(source + at + one, mask=inside)
            tl.store(to + goes + one, value.to(to.dtype.element_ty), mask=inside)
