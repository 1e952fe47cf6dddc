"""The Triton program of ``silu``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_elements(to, source, total, BLOCK: tl.constexpr):
    """A block per turn, in the order of memory; half precision is computed in float32."""
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, total, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < total
        x = tl.load(source + index, mask=inside)
        if x.dtype != tl.float64:
            x = x.to(tl.float32)
        tl.store(to + index, (x / (1 + tl.exp(-x))).to(to.dtype.element_ty), mask=inside)
