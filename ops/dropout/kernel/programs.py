"""The Triton program of ``dropout``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale(to, source, index, total, uniform, P: tl.constexpr):
    inside = index < total
    value = tl.load(source + index, mask=inside)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    kept = tl.where(uniform > P, value * (1.0 / (1.0 - P)), 0.0)
    tl.store(to + index, kept.to(to.dtype.element_ty), mask=inside)


@triton.jit
def drop(to, source, seed, total, P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Of each element, in the order of memory, zero or ``1 / (1 - P)`` times it.

    Four random numbers come from one Philox counter, so a turn takes four blocks. What is drawn for an element depends
    on the seed and its position alone, not on the grid.
    """
    number = tl.load(seed)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if WIDE:
        first = first.to(tl.int64)
    for start in range(first * BLOCK, tl.cdiv(total, 4), step * BLOCK):
        lane = tl.arange(0, BLOCK)
        r0, r1, r2, r3 = tl.rand4x(number, start + lane)
        index = start * 4 + lane
        _scale(to, source, index, total, r0, P)
        _scale(to, source, index + BLOCK, total, r1, P)
        _scale(to, source, index + 2 * BLOCK, total, r2, P)
        _scale(to, source, index + 3 * BLOCK, total, r3, P)
