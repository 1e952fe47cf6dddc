"""The Triton program of ``embedding``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(debug=True)
def gather_rows(
    to,
    weight,
    indices,
    entries,
    width,
    row_stride,
    column_stride,
    total,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows, or a part of one, per turn, of a table of so many ``entries``.

    With ``debug`` an index out of range stops the device, which is what PyTorch's does.
    """
    parts = tl.cdiv(width, COLUMNS)
    for turn in range(tl.program_id(0).to(tl.int64), tl.cdiv(total, ROWS) * parts, tl.num_programs(0)):
        place = (turn // parts) * ROWS + tl.arange(0, ROWS)  # 64 bits wide, as a turn is
        column = (turn % parts) * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.load(indices + place, mask=place < total, other=0).to(tl.int64)
        tl.device_assert((row >= 0) & (row < entries), "index out of range in self")
        inside = (place < total)[:, None] & (column < width)[None, :]
        value = tl.load(weight + (row * row_stride)[:, None] + (column * column_stride)[None, :], mask=inside)
        tl.store(to + (place * width)[:, None] + column[None, :], value, mask=inside)
