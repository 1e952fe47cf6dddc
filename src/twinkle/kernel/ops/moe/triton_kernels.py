"""Triton programs of a mixture of experts: matrix products of rows that lie expert by expert.

Rows are sorted slots (see :mod:`twinkle.kernel.ops.moe.routing`); a program computes a tile of some expert's rows, and
finds out which from where the experts' rows end. Tiles beyond the last are left at once: how many there are is known
to the device alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from twinkle.kernel.ops.glu.triton_kernels import _activate


@triton.jit
def _tile_of(tile, ends_ptr, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first row and end of a tile; an expert that doesn't exist for a tile beyond the last."""
    at = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + at, mask=at < experts, other=0)
    starts = tl.load(ends_ptr + at - 1, mask=(at > 0) & (at < experts), other=0)
    tiles = tl.where(at < experts, (ends - starts + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    own = at == expert
    first = tl.sum(tl.where(own, starts + (tile - upto + tiles) * ROWS, 0), axis=0)
    return expert, first, tl.sum(tl.where(own, ends, 0), axis=0)


@triton.jit
def _swizzled(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column tile of a program, so that programs which run together read the same weights and rows."""
    wide = GROUP * column_tiles
    first = (program // wide) * GROUP
    high = tl.minimum(row_tiles - first, GROUP)
    return first + (program % wide) % high, (program % wide) // high


@triton.jit
def _gated(gate, up, limit, alpha, offset, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr):
    """``activation(gate) * (up + offset)`` with both clamped, and its derivatives by gate and up, in fp32."""
    gate_counts = 1.0
    up_counts = 1.0
    if CLAMPED:
        gate_counts = tl.where(gate <= limit, 1.0, 0.0)
        up_counts = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == "silu":  # gate * sigmoid(alpha * gate)
        value, slope = _activate(gate * alpha, ACTIVATION)
        value = value / alpha
    else:
        value, slope = _activate(gate, ACTIVATION)
    up = up + offset
    return value * up, slope * up * gate_counts, value * up_counts


@triton.jit
def up_kernel(
    x_ptr, slots_ptr, ends_ptr, weight_ptr, bias_ptr, gate_up_ptr, out_ptr,
    experts, row_tiles, column_tiles, hidden, width, top_k, x_stride,
    weight_expert, weight_column, weight_row, weight_up, bias_expert, bias_column, bias_up, limit, alpha, offset,
    BIAS: tl.constexpr, KEEP: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Both projections of the tokens' rows and the gated product: ``out [S, I]``; ``gate_up [S, 2 I]`` for backward."""
    tile, column_tile = _swizzled(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert, first, end = _tile_of(tile, ends_ptr, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    rows = first + tl.arange(0, ROWS)
    here = rows < end
    tokens = tl.load(slots_ptr + rows, mask=here, other=0) // top_k
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    inner = tl.arange(0, INNER)
    x = x_ptr + tokens[:, None] * x_stride + inner[None, :]
    weight = weight_ptr + expert.to(tl.int64) * weight_expert
    weight += columns[None, :].to(tl.int64) * weight_column + inner[:, None].to(tl.int64) * weight_row
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, INNER):
        left = inner < hidden - start
        a = tl.load(x, mask=here[:, None] & left[None, :], other=0.0)
        mask = left[:, None] & inside[None, :]
        gate = tl.dot(a, tl.load(weight, mask=mask, other=0.0), gate, input_precision=PRECISION)
        up = tl.dot(a, tl.load(weight + weight_up, mask=mask, other=0.0), up, input_precision=PRECISION)
        x += INNER
        weight += INNER * weight_row
    if BIAS:
        bias = bias_ptr + expert * bias_expert + columns * bias_column
        gate += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + bias_up, mask=inside, other=0.0).to(tl.float32)[None, :]
    # The product is computed from what the backward will read: rounded.
    dtype = out_ptr.dtype.element_ty
    mask = here[:, None] & inside[None, :]
    wide = rows[:, None].to(tl.int64) * width
    if KEEP:
        tl.store(gate_up_ptr + 2 * wide + columns[None, :], gate.to(dtype), mask=mask)
        tl.store(gate_up_ptr + 2 * wide + width + columns[None, :], up.to(dtype), mask=mask)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    product, _, _ = _gated(gate, up, limit, alpha, offset, ACTIVATION, CLAMPED)
    tl.store(out_ptr + wide + columns[None, :], product.to(dtype), mask=mask)


@triton.jit
def rows_kernel(
    a_ptr, ends_ptr, weight_ptr, bias_ptr, out_ptr,
    experts, row_tiles, column_tiles, inner_size, width, a_stride, a_part,
    weight_expert, weight_column, weight_row, weight_part, bias_expert,
    PARTS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """``out [S, N] = a [S, PARTS * K] @ weight``, each expert's rows by its own weight ``[PARTS * K, N]``."""
    tile, column_tile = _swizzled(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert, first, end = _tile_of(tile, ends_ptr, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    rows = first + tl.arange(0, ROWS)
    here = rows < end
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    inner = tl.arange(0, INNER)
    wide = rows[:, None].to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        a = a_ptr + wide * a_stride + part * a_part + inner[None, :]
        weight = weight_ptr + expert.to(tl.int64) * weight_expert + part * weight_part
        weight += columns[None, :].to(tl.int64) * weight_column + inner[:, None].to(tl.int64) * weight_row
        for start in range(0, inner_size, INNER):
            left = inner < inner_size - start
            rows_of_a = tl.load(a, mask=here[:, None] & left[None, :], other=0.0)
            of_weight = tl.load(weight, mask=left[:, None] & inside[None, :], other=0.0)
            total = tl.dot(rows_of_a, of_weight, total, input_precision=PRECISION)
            a += INNER
            weight += INNER * weight_row
    if BIAS:
        total += tl.load(bias_ptr + expert * bias_expert + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + wide * width + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
def combine_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, y_stride, width, top_k, out_stride,
    WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[t] = sum over k of weights[t, k] * y[places[t, k]]``, or the plain sum."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(top_k):
        place = tl.load(places_ptr + token * top_k + k).to(tl.int64)
        row = tl.load(y_ptr + place * y_stride + columns, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * top_k + k).to(tl.float32)
        total += row
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_kernel(
    grad_ptr, slots_ptr, ends_ptr, weight_ptr, weights_ptr, gate_up_ptr, dgate_up_ptr, product_ptr, share_ptr,
    total, experts, row_tiles, column_tiles, hidden, width, top_k, grad_stride,
    weight_expert, weight_column, weight_row, limit, alpha, offset,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """From the output's gradient ``[T, H]`` back through the second product and the gate.

    Writes ``dgate_up [S, 2 I]``; ``product [S, I]``, the gated product times the router's weight, for the second
    weight's gradient; and ``share [column tiles, S]``, parts of the gradients of the router's weights.
    """
    tile, column_tile = _swizzled(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert, first, end = _tile_of(tile, ends_ptr, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    rows = first + tl.arange(0, ROWS)
    here = rows < end
    slots = tl.load(slots_ptr + rows, mask=here, other=0)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    inner = tl.arange(0, INNER)
    grad = grad_ptr + (slots // top_k)[:, None] * grad_stride + inner[None, :]
    weight = weight_ptr + expert.to(tl.int64) * weight_expert
    weight += columns[None, :].to(tl.int64) * weight_column + inner[:, None].to(tl.int64) * weight_row
    back = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, INNER):
        left = inner < hidden - start
        a = tl.load(grad, mask=here[:, None] & left[None, :], other=0.0)
        of_weight = tl.load(weight, mask=left[:, None] & inside[None, :], other=0.0)
        back = tl.dot(a, of_weight, back, input_precision=PRECISION)
        grad += INNER
        weight += INNER * weight_row
    dtype = dgate_up_ptr.dtype.element_ty
    mask = here[:, None] & inside[None, :]
    wide = rows[:, None].to(tl.int64) * width
    gate = tl.load(gate_up_ptr + 2 * wide + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * wide + width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    product, by_gate, by_up = _gated(gate, up, limit, alpha, offset, ACTIVATION, CLAMPED)
    worth = tl.load(weights_ptr + slots, mask=here, other=0.0).to(tl.float32)[:, None]
    product = product.to(dtype).to(tl.float32)
    rest = tl.where(mask, product * back, 0.0)
    tl.store(share_ptr + column_tile.to(tl.int64) * total + rows, tl.sum(rest, axis=1), mask=here)
    back *= worth
    tl.store(dgate_up_ptr + 2 * wide + columns[None, :], (back * by_gate).to(dtype), mask=mask)
    tl.store(dgate_up_ptr + 2 * wide + width + columns[None, :], (back * by_up).to(dtype), mask=mask)
    tl.store(product_ptr + wide + columns[None, :], (product * worth).to(dtype), mask=mask)


@triton.jit
def weight_kernel(
    a_ptr, b_ptr, slots_ptr, ends_ptr, out_ptr, bias_ptr,
    height_tiles, width_tiles, height, width, half, top_k, a_stride, b_stride,
    out_expert, out_row, out_column, out_half, bias_expert, bias_row, bias_half,
    A_TOKENS: tl.constexpr, B_TOKENS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A weight's gradient: ``out[e] = a.T @ b`` over the rows of expert e; zeros for an expert without rows.

    ``a`` and ``b`` are read by slot, or by the slot's token; ``half`` is where the second projection's rows begin.
    """
    program = tl.program_id(0)
    expert = program // (height_tiles * width_tiles)
    tile = program % (height_tiles * width_tiles)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    m = (tile // width_tiles) * ROWS + tl.arange(0, ROWS)
    n = (tile % width_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    for start in range(first, end, INNER):
        rows = start + inner
        here = rows < end
        tokens = rows.to(tl.int64)
        if A_TOKENS or B_TOKENS:
            tokens = tl.load(slots_ptr + rows, mask=here, other=0) // top_k
        of_a = tokens if A_TOKENS else rows.to(tl.int64)
        of_b = tokens if B_TOKENS else rows.to(tl.int64)
        a = tl.load(
            a_ptr + of_a[None, :] * a_stride + m[:, None], mask=here[None, :] & (m < height)[:, None], other=0.0
        )
        b = tl.load(b_ptr + of_b[:, None] * b_stride + n[None, :], mask=here[:, None] & (n < width)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if BIAS:
            sums += tl.sum(a.to(tl.float32), axis=1)
    second = m >= half
    row = tl.where(second, m - half, m).to(tl.int64)
    out = out_ptr + expert.to(tl.int64) * out_expert + (row * out_row + tl.where(second, out_half, 0))[:, None]
    out += n[None, :].to(tl.int64) * out_column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m < height)[:, None] & (n < width)[None, :])
    if BIAS and tile % width_tiles == 0:
        bias = bias_ptr + expert * bias_expert + row * bias_row + tl.where(second, bias_half, 0)
        tl.store(bias, sums.to(bias_ptr.dtype.element_ty), mask=m < height)


@triton.jit
def weighted_sums_kernel(
    grad_ptr, slots_ptr, ends_ptr, weights_ptr, out_ptr, width, top_k, grad_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out[e] = sum of weights[s] * grad[token of s]`` over the slots s of expert e, in partial sums."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < width)[None, :]
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        here = rows < end
        slots = tl.load(slots_ptr + rows, mask=here, other=0)
        worth = tl.load(weights_ptr + slots, mask=here, other=0.0).to(tl.float32)
        row = grad_ptr + (slots // top_k)[:, None] * grad_stride + columns[None, :]
        total += worth[:, None] * tl.load(row, mask=here[:, None] & inside, other=0.0).to(tl.float32)
    sums = tl.sum(total, axis=0)
    out = out_ptr + expert.to(tl.int64) * width + columns
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def gate_kernel(
    gate_up_ptr, ends_ptr, out_ptr, experts, width, limit, alpha, offset,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gated product of both projections: ``[S, 2 I]`` to ``[S, I]``."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends_ptr + experts - 1):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    product, _, _ = _gated(gate, up, limit, alpha, offset, ACTIVATION, CLAMPED)
    tl.store(out_ptr + row * width + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_rows_kernel(
    back_ptr, slots_ptr, ends_ptr, weights_ptr, gate_up_ptr, dgate_up_ptr, product_ptr, share_ptr,
    experts, width, limit, alpha, offset,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The second half of :func:`gate_backward_kernel`, where the product was computed elsewhere: ``back [S, I]``."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends_ptr + experts - 1):
        return
    dtype = dgate_up_ptr.dtype.element_ty
    worth = tl.load(weights_ptr + tl.load(slots_ptr + row)).to(tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        back = tl.load(back_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        product, by_gate, by_up = _gated(gate, up, limit, alpha, offset, ACTIVATION, CLAMPED)
        product = product.to(dtype).to(tl.float32)
        sums += tl.where(inside, product * back, 0.0)
        back *= worth
        tl.store(dgate_up_ptr + row * 2 * width + columns, (back * by_gate).to(dtype), mask=inside)
        tl.store(dgate_up_ptr + row * 2 * width + width + columns, (back * by_up).to(dtype), mask=inside)
        tl.store(product_ptr + row * width + columns, (product * worth).to(dtype), mask=inside)
    tl.store(share_ptr + row, tl.sum(sums, axis=0))
