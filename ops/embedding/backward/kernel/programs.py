"""The Triton program of ``embedding_dense_backward``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_rows(
    to,
    grads,
    rows,
    positions,
    ends,
    width,
    padding,
    total,
    grad_stride,
    column_stride,
    MEAN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row of the table, a part of its width per turn: always the same sum, whatever the grid.

    ``rows`` are sorted; ``positions`` tells where each was taken, ``ends`` where its like end. Only the first of its
    like sums.
    """
    parts = tl.cdiv(width, BLOCK)
    for turn in range(tl.program_id(0).to(tl.int64), total * parts, tl.num_programs(0)):
        first = turn // parts
        row = tl.load(rows + first).to(tl.int64)
        before = tl.load(rows + first - 1, mask=first > 0, other=-1).to(tl.int64)
        if (row != before) & (row != padding):
            column = (turn % parts) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            end = tl.load(ends + first)
            summed = tl.zeros((BLOCK,), WIDE)
            for i in range(first, end):
                at = tl.load(positions + i) * grad_stride
                summed += tl.load(grads + at + column * column_stride, mask=inside, other=0).to(WIDE)
            if MEAN:
                summed = summed / (end - first).to(WIDE)
            tl.store(to + row * width + column, summed.to(to.dtype.element_ty), mask=inside)
