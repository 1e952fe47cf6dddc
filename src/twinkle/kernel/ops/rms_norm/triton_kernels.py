"""Triton programs of RMSNorm, with and without gate: one pass forward, one pass backward.

Forward: a program normalises a few rows. Backward: as many programs as the device runs at once walk over the rows, each
with the weight's gradient in registers; the programs' sums are added up by the last to arrive, so no second launch is
needed. It computes ``rstd`` again, of rows that it reads anyway: to make and save a tensor of them takes the host as
long as a launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from twinkle.kernel.ops.triton_parts import arange, inverse_rms, sum_of_programs


@triton.jit
def _row_starts(rows, middle, inner, outer_stride, middle_stride, stride):
    outer = rows // inner
    return (outer // middle) * outer_stride + (outer % middle) * middle_stride + (rows % inner) * stride


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, gate_ptr, y_ptr,
    n_rows, width, eps,
    x_middle, x_inner, x_outer, x_mid_stride, x_stride, x_column,
    g_middle, g_inner, g_outer, g_mid_stride, g_stride, g_column,
    y_middle, y_inner, y_outer, y_mid_stride, y_stride, y_column,
    OFFSET: tl.constexpr, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOP: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    columns = arange(BLOCK, FAR)
    x_start = x_ptr + _row_starts(rows, x_middle, x_inner, x_outer, x_mid_stride, x_stride)[:, None]
    y_start = y_ptr + _row_starts(rows, y_middle, y_inner, y_outer, y_mid_stride, y_stride)[:, None]
    if HAS_GATE:
        g_start = gate_ptr + _row_starts(rows, g_middle, g_inner, g_outer, g_mid_stride, g_stride)[:, None]

    if LOOP:
        squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            mask = row_mask[:, None] & (at < width)[None, :]
            x = tl.load(x_start + at[None, :] * x_column, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        rstd = inverse_rms(tl.sum(squares, axis=1), width, eps)
    else:
        mask = row_mask[:, None] & (columns < width)[None, :]
        loaded = tl.load(x_start + columns[None, :] * x_column, mask=mask, other=0.0)
        x = loaded.to(tl.float32)
        rstd = inverse_rms(tl.sum(x * x, axis=1), width, eps)

    for start in range(0, width if LOOP else BLOCK, BLOCK):
        at = start + columns
        mask = row_mask[:, None] & (at < width)[None, :]
        if LOOP:
            loaded = tl.load(x_start + at[None, :] * x_column, mask=mask, other=0.0)
            x = loaded.to(tl.float32)
        if CAST == "factor":
            y = (x * rstd.to(loaded.dtype).to(tl.float32)[:, None]).to(loaded.dtype)
        else:
            y = x * rstd[:, None]
        if CAST == "before":
            y = y.to(loaded.dtype).to(tl.float32)
        if HAS_WEIGHT:
            w = tl.load(w_ptr + at, mask=at < width, other=0.0).to(tl.float32) + OFFSET
            y = y * w[None, :]
        if HAS_GATE:
            gate = tl.load(g_start + at[None, :] * g_column, mask=mask, other=0.0).to(tl.float32)
            if w_ptr.dtype.element_ty == x_ptr.dtype.element_ty:  # else the product was promoted to fp32
                y = y.to(loaded.dtype).to(tl.float32)
            y = y * (gate * tl.sigmoid(gate))
        tl.store(y_start + at[None, :] * y_column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, w_ptr, gate_ptr, dx_ptr, dw_ptr, dgate_ptr, partial_ptr, arrived_ptr,
    n_rows, width, n_blocks, n_programs, eps,
    dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride, dy_column,
    x_middle, x_inner, x_outer, x_mid_stride, x_stride, x_column,
    g_middle, g_inner, g_outer, g_mid_stride, g_stride, g_column,
    dx_middle, dx_inner, dx_outer, dx_mid_stride, dx_stride, dx_column,
    dg_middle, dg_inner, dg_outer, dg_mid_stride, dg_stride, dg_column,
    OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_GATE: tl.constexpr, NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = arange(BLOCK, FAR)
    in_row = columns < width
    if HAS_WEIGHT:
        w = tl.load(w_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    rows_each = tl.full((), ROWS, tl.int64)
    for block in tl.range(program, n_blocks, n_programs, num_stages=STAGES):
        rows = tl.arange(0, ROWS) + rows_each * block
        row_mask = rows < n_rows
        mask = row_mask[:, None] & in_row[None, :]
        x_start = _row_starts(rows, x_middle, x_inner, x_outer, x_mid_stride, x_stride)[:, None]
        dy_start = _row_starts(rows, dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride)[:, None]
        x = tl.load(x_ptr + x_start + columns[None, :] * x_column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_start + columns[None, :] * dy_column, mask=mask, other=0.0).to(tl.float32)
        # 0 where there is no row: without an eps it would be infinite, and 0 * inf a part of the weight's gradient.
        rstd = tl.where(row_mask, inverse_rms(tl.sum(x * x, axis=1), width, eps), 0.0)
        h = x * rstd[:, None]
        if HAS_GATE:
            g_start = _row_starts(rows, g_middle, g_inner, g_outer, g_mid_stride, g_stride)[:, None]
            gate = tl.load(gate_ptr + g_start + columns[None, :] * g_column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            normed = h * w[None, :]
            dgate = dy * normed * (sigmoid + silu * (1.0 - sigmoid))
            dg_start = _row_starts(rows, dg_middle, dg_inner, dg_outer, dg_mid_stride, dg_stride)[:, None]
            tl.store(
                dgate_ptr + dg_start + columns[None, :] * dg_column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask
            )
            dy = dy * silu
        if NEEDS_DW:
            dw += tl.sum(dy * h, axis=0)
        if HAS_WEIGHT:
            dy = dy * w[None, :]
        projection = rstd * tl.sum(dy * x, axis=1) / width  # neither sum waits for the other
        dx = rstd[:, None] * (dy - h * projection[:, None])
        dx_start = _row_starts(rows, dx_middle, dx_inner, dx_outer, dx_mid_stride, dx_stride)[:, None]
        tl.store(dx_ptr + dx_start + columns[None, :] * dx_column, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    if NEEDS_DW:
        tl.store(partial_ptr + program * width + columns, dw, mask=in_row)
        total, is_last = sum_of_programs(partial_ptr, arrived_ptr, program, n_programs, columns, in_row, width, GROUP)
        if is_last:
            tl.store(dw_ptr + columns, total.to(dw_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def wide_backward_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, rstd_ptr,
    width, eps,
    dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride, dy_column,
    x_middle, x_inner, x_outer, x_mid_stride, x_stride, x_column,
    dx_middle, dx_inner, dx_outer, dx_mid_stride, dx_stride, dx_column,
    OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = arange(BLOCK, FAR)
    x_start = x_ptr + _row_starts(row, x_middle, x_inner, x_outer, x_mid_stride, x_stride)
    dy_start = dy_ptr + _row_starts(row, dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride)
    dx_start = dx_ptr + _row_starts(row, dx_middle, dx_inner, dx_outer, dx_mid_stride, dx_stride)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + columns
        mask = at < width
        x = tl.load(x_start + at * x_column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_start + at * dy_column, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            dy *= tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) + OFFSET
        squares += x * x
        products += dy * x
    rstd = inverse_rms(tl.sum(squares, axis=0), width, eps)
    if NEEDS_DW:
        tl.store(rstd_ptr + row, rstd)
    projection = rstd * tl.sum(products, axis=0) / width
    for start in range(0, width, BLOCK):
        at = start + columns
        mask = at < width
        h = tl.load(x_start + at * x_column, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_start + at * dy_column, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            dy *= tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) + OFFSET
        dx = rstd * (dy - h * projection)
        tl.store(dx_start + at * dx_column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def wide_weight_kernel(
    dy_ptr, x_ptr, rstd_ptr, dw_ptr,
    n_rows, width,
    dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride, dy_column,
    x_middle, x_inner, x_outer, x_mid_stride, x_stride, x_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + arange(BLOCK, FAR)
    in_row = columns < width
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = tl.arange(0, ROWS).to(tl.int64) + start
        row_mask = rows < n_rows
        mask = row_mask[:, None] & in_row[None, :]
        x_start = _row_starts(rows, x_middle, x_inner, x_outer, x_mid_stride, x_stride)[:, None]
        dy_start = _row_starts(rows, dy_middle, dy_inner, dy_outer, dy_mid_stride, dy_stride)[:, None]
        x = tl.load(x_ptr + x_start + columns[None, :] * x_column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_start + columns[None, :] * dy_column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        dw += tl.sum(dy * x * rstd[:, None], axis=0)
    tl.store(dw_ptr + columns, dw.to(dw_ptr.dtype.element_ty), mask=in_row)
