"""Triton programs of a residual sum and its RMSNorm: one pass forward, one pass backward, of rows without gaps.

The sum is rounded before it is normalised, as the original's; otherwise as in ``rms_norm``'s programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from twinkle.kernel.ops.triton_parts import inverse_rms, sum_of_programs


@triton.jit
def forward_kernel(
    residual_ptr, summand_ptr, w_ptr, total_ptr, y_ptr, rstd_ptr,
    n_rows, width, eps,
    OFFSET: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    in_row = columns < width
    at = rows[:, None] * width + columns[None, :]
    mask = (rows < n_rows)[:, None] & in_row[None, :]
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    summand = tl.load(summand_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = (residual + summand).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=mask)
    x = total.to(tl.float32)
    rstd = inverse_rms(tl.sum(x * x, axis=1), width, eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = x * rstd[:, None]
    if CAST == "before":
        y = y.to(total.dtype).to(tl.float32)
    w = tl.load(w_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + OFFSET
    tl.store(y_ptr + at, (y * w[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dtotal_ptr, dy_ptr, total_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, partial_ptr, arrived_ptr,
    n_rows, width, n_blocks, n_programs,
    OFFSET: tl.constexpr, NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx`` is the gradient of either summand: what comes along the residual and what comes through the norm."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    in_row = columns < width
    w = tl.load(w_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    rows_each = tl.full((), ROWS, tl.int64)
    for block in tl.range(program, n_blocks, n_programs, num_stages=STAGES):
        rows = tl.arange(0, ROWS) + rows_each * block
        at = rows[:, None] * width + columns[None, :]
        mask = (rows < n_rows)[:, None] & in_row[None, :]
        x = tl.load(total_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dtotal = tl.load(dtotal_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        h = x * rstd[:, None]
        if NEEDS_DW:
            dw += tl.sum(dy * h, axis=0)
        dy = dy * w[None, :]
        projection = tl.sum(dy * h, axis=1) / width
        dx = dtotal + rstd[:, None] * (dy - h * projection[:, None])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DW:
        tl.store(partial_ptr + program * width + columns, dw, mask=in_row)
        total, is_last = sum_of_programs(partial_ptr, arrived_ptr, program, n_programs, columns, in_row, width, GROUP)
        if is_last:
            tl.store(dw_ptr + columns, total.to(dw_ptr.dtype.element_ty), mask=in_row)
