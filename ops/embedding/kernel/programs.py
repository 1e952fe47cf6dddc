"""The Triton program of ``embedding``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(debug=True)
def gather_rows(to, weight, indices, rows, width, row_stride, column_stride, total, BLOCK: tl.constexpr):
    """A part of a row per turn. With ``debug`` an index out of range stops the device, which is what PyTorch's does."""
    parts = tl.cdiv(width, BLOCK)
    for turn in range(tl.program_id(0).to(tl.int64), total * parts, tl.num_programs(0)):
        place = turn // parts
        row = tl.load(indices + place).to(tl.int64)
        tl.device_assert((row >= 0) & (row < rows), "index out of range in self")
        column = (turn % parts) * BLOCK + tl.arange(0, BLOCK)  # 64 bits wide, as a turn is
        inside = column < width
        value = tl.load(weight + row * row_stride + column * column_stride, mask=inside)
        tl.store(to + place * width + column, value, mask=inside)
