"""Parts of several ops' Triton programs: the numbers of a tile, a norm's factor, sums over all programs of a launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

GROUP = 16
"""Programs whose sums are added first; the sums of these are added next."""


@triton.jit
def arange(SIZE: tl.constexpr, FAR: tl.constexpr):
    """The numbers below SIZE, in 64 bits where they are FAR: where a stride times them passes 32 bits."""
    numbers = tl.arange(0, SIZE)
    if FAR:
        numbers = numbers.to(tl.int64)
    return numbers


@triton.jit
def inverse_rms(squares, width, eps):
    """The factors of rows of ``width`` numbers, of their sums of squares, in fp32.

    Triton takes a Python number in fp32, but a compiler hands it over in fp64, and all that it meets would be that.
    """
    return tl.math.rsqrt(squares / width + tl.cast(eps, tl.float32))


@triton.jit
def sum_of_programs(partial_ptr, arrived_ptr, program, n_programs, columns, in_row, width, GROUP: tl.constexpr):
    """Adds up what each program has stored in its row of ``partial``, ``width`` numbers in fp32, within the launch.

    In a tree of two levels, by whoever arrives last; in a fixed order, so with the same bits on every run. ``arrived``
    holds zeros before and after: one number for the groups, and one for each of them.

    Returns:
        the sum at ``columns``, and whether it is this program that has it; the others have zeros.
    """
    group = program // GROUP
    n_groups = (n_programs + GROUP - 1) // GROUP
    members = tl.minimum(GROUP, n_programs - group * GROUP)
    total = tl.zeros(columns.shape, dtype=tl.float32)
    is_last = program < 0
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + 1 + group, 1, sem="acq_rel") == members - 1:
        tl.debug_barrier()
        for member in range(0, members):
            row = partial_ptr + (group * GROUP + member) * width
            total += tl.load(row + columns, mask=in_row, other=0.0, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(partial_ptr + group * GROUP * width + columns, total, mask=in_row)
        tl.store(arrived_ptr + 1 + group, 0)  # ready for the next call
        total = tl.zeros(columns.shape, dtype=tl.float32)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == n_groups - 1:
            tl.debug_barrier()
            for other in range(0, n_groups):
                row = partial_ptr + other * GROUP * width
                total += tl.load(row + columns, mask=in_row, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr, 0)
            is_last = program >= 0
    return total, is_last


def counters(programs: int) -> int:
    """How many numbers ``arrived`` has."""
    return 1 + (programs + GROUP - 1) // GROUP
