"""The Triton program of ``dropout``."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS: tl.constexpr = tl.constexpr(7)
"""Of Philox-4x32: the fewest with which it passes all tests of BigCrush (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011). With the usual ten, which leave a margin, an H200 takes a fifth longer."""


@triton.jit
def _scale(to, source, index, total, number, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    inside = index < total
    value = tl.load(source + index, mask=inside)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    kept = tl.where(number.to(tl.uint32, bitcast=True) >= THRESHOLD, value * SCALE, 0.0)
    tl.store(to + index, kept.to(to.dtype.element_ty), mask=inside)


@triton.jit
def drop(
    to,
    source,
    seed,
    total,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``SCALE`` times each element, in the order of memory; or zero where a 32-bit number is below ``THRESHOLD``.

    Four random numbers come from one Philox counter, so a turn takes four blocks. What is drawn for an element depends
    on the seed and its position alone, not on the grid. ``ONCE`` says that there are as many programs as turns.
    """
    key = tl.load(seed)
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    for i in range(1 if ONCE else tl.cdiv(tl.cdiv(total, 4 * BLOCK), tl.num_programs(0))):
        start = (first + i * tl.num_programs(0)) * BLOCK
        lane = tl.arange(0, BLOCK)
        r0, r1, r2, r3 = tl.randint4x(key, start + lane, ROUNDS)
        index = start * 4 + lane
        _scale(to, source, index, total, r0, THRESHOLD, SCALE)
        _scale(to, source, index + BLOCK, total, r1, THRESHOLD, SCALE)
        _scale(to, source, index + 2 * BLOCK, total, r2, THRESHOLD, SCALE)
        _scale(to, source, index + 3 * BLOCK, total, r3, THRESHOLD, SCALE)
