"""Triton programs of the norms and the rotary embedding of queries and keys: one pass forward, one backward.

Forward: a program takes the heads of one token, or a block of them where there are many, normalises each and rotates
what that gives. Backward: as many programs as the device runs at once walk over the tokens, each with the gradients of
both weights in registers; statistics are computed again, since the heads are there anyway, so nothing is kept for them.

A head lies in registers as its two halves that rotate with one another, ``a`` and ``b``, and the channels that don't
rotate, ``c``, where there are any.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from twinkle.kernel.ops.triton_parts import arange, inverse_rms, sum_of_programs


@triton.jit
def _halves(at, stride, pair, pairs, mask):
    """What lies at channels ``a`` and at channels ``b``, in fp32."""
    at += pair * stride
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + tl.cast(pairs, pair.dtype) * stride, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _weights(w_ptr, pair, pairs, OFFSET: tl.constexpr):
    """A norm's factors of channels ``a`` and ``b``."""
    a, b = _halves(w_ptr, 1, pair, pairs, pair < pairs)
    return a + OFFSET, b + OFFSET


@triton.jit
def _scaled(x, rstd, weight, dtype: tl.constexpr, CAST: tl.constexpr, SAME: tl.constexpr):
    """A norm's result, rounded where the original rounds it; SAME: the weight has the input's dtype."""
    y = x * rstd[:, None]
    if CAST == "before":
        y = y.to(dtype).to(tl.float32)
    y = y * weight[None, :]
    if CAST == "after" or SAME:
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def _turn_heads(
    x_row, y_row, w_ptr, cos_a, sin_a, cos_b, sin_b, eps, pair,
    first, heads, x_head, x_channel, y_head, y_channel, head_dim, pairs,
    OFFSET: tl.constexpr, CAST: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Of HEADS heads from ``first`` on what is there."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    SAME: tl.constexpr = w_ptr.dtype.element_ty == x_row.dtype.element_ty
    head = first + arange(HEADS, FAR)
    x_at = x_row + head[:, None] * x_head
    y_at = y_row + head[:, None] * y_head
    mask = (head < heads)[:, None] & (pair < pairs)[None, :]
    a, b = _halves(x_at, x_channel, pair[None, :], pairs, mask)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if REST > 0:
        rest = 2 * pairs + arange(REST, FAR)
        c_mask = (head < heads)[:, None] & (rest < head_dim)[None, :]
        c = tl.load(x_at + rest[None, :] * x_channel, mask=c_mask, other=0.0).to(tl.float32)
        squares += tl.sum(c * c, axis=1)
    rstd = inverse_rms(squares, head_dim, eps)
    a_weight, b_weight = _weights(w_ptr, pair, pairs, OFFSET)
    a = _scaled(a, rstd, a_weight, dtype, CAST, SAME)
    b = _scaled(b, rstd, b_weight, dtype, CAST, SAME)
    a_turned = a * cos_a[None, :] - b * sin_a[None, :]
    b_turned = b * cos_b[None, :] + a * sin_b[None, :]
    tl.store(y_at + pair[None, :] * y_channel, a_turned.to(y_row.dtype.element_ty), mask=mask)
    tl.store(y_at + (pair + pairs)[None, :] * y_channel, b_turned.to(y_row.dtype.element_ty), mask=mask)
    if REST > 0:
        c_weight = tl.load(w_ptr + rest, mask=rest < head_dim, other=0.0).to(tl.float32) + OFFSET
        c = _scaled(c, rstd, c_weight, dtype, CAST, SAME)
        tl.store(y_at + rest[None, :] * y_channel, c.to(y_row.dtype.element_ty), mask=c_mask)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr,
    q_eps, k_eps, length, q_heads, k_heads, blocks, head_dim, pairs,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    qo_batch, qo_token, qo_head, qo_channel, ko_batch, ko_token, ko_head, ko_channel,
    cos_batch, cos_token, cos_channel, sin_batch, sin_token, sin_channel,
    OFFSET: tl.constexpr, CAST: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    block = program % blocks
    batch = row // length
    token = row % length
    pair = arange(PAIRS, FAR)
    is_pair = pair < pairs
    cos_a, cos_b = _halves(cos_ptr + batch * cos_batch + token * cos_token, cos_channel, pair, pairs, is_pair)
    sin_a, sin_b = _halves(sin_ptr + batch * sin_batch + token * sin_token, sin_channel, pair, pairs, is_pair)
    _turn_heads(
        q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * qo_batch + token * qo_token,
        qw_ptr, cos_a, sin_a, cos_b, sin_b, q_eps, pair,
        block * Q_HEADS, q_heads, q_head, q_channel, qo_head, qo_channel, head_dim, pairs,
        OFFSET, CAST, Q_HEADS, REST, FAR,
    )  # fmt: skip
    _turn_heads(
        k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * ko_batch + token * ko_token,
        kw_ptr, cos_a, sin_a, cos_b, sin_b, k_eps, pair,
        block * K_HEADS, k_heads, k_head, k_channel, ko_head, ko_channel, head_dim, pairs,
        OFFSET, CAST, K_HEADS, REST, FAR,
    )  # fmt: skip


@triton.jit
def _turn_heads_back(
    dy_row, x_row, dx_row, a_weight, b_weight, c_weight, cos_a, sin_a, cos_b, sin_b, eps, pair,
    first, heads, dy_head, dy_channel, x_head, x_channel, dx_head, dx_channel, head_dim, pairs,
    HEADS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the heads, and gives the parts of the weight's that they bring."""
    head = first + arange(HEADS, FAR)
    there = head < heads
    x_at = x_row + head[:, None] * x_head
    dy_at = dy_row + head[:, None] * dy_head
    dx_at = dx_row + head[:, None] * dx_head
    mask = there[:, None] & (pair < pairs)[None, :]
    a, b = _halves(x_at, x_channel, pair[None, :], pairs, mask)
    a_grad, b_grad = _halves(dy_at, dy_channel, pair[None, :], pairs, mask)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if REST > 0:
        rest = (2 * pairs + arange(REST, FAR))[None, :]
        c_mask = there[:, None] & (rest < head_dim)
        c = tl.load(x_at + rest * x_channel, mask=c_mask, other=0.0).to(tl.float32)
        dc = tl.load(dy_at + rest * dy_channel, mask=c_mask, other=0.0).to(tl.float32)
        squares += tl.sum(c * c, axis=1)
    # A head that isn't there adds nothing to the weight's gradient, whatever eps is.
    rstd = tl.where(there, inverse_rms(squares, head_dim, eps), 0.0)[:, None]
    a *= rstd
    b *= rstd
    da = a_grad * cos_a[None, :] + b_grad * sin_b[None, :]
    db = b_grad * cos_b[None, :] - a_grad * sin_a[None, :]
    a_sum = tl.sum(da * a, axis=0)
    b_sum = tl.sum(db * b, axis=0)
    c_sum = c_weight
    da *= a_weight[None, :]
    db *= b_weight[None, :]
    projection = tl.sum(da * a, axis=1) + tl.sum(db * b, axis=1)
    if REST > 0:
        c *= rstd
        c_sum = tl.sum(dc * c, axis=0)
        dc *= c_weight[None, :]
        projection += tl.sum(dc * c, axis=1)
    projection = (projection / head_dim)[:, None]
    a = rstd * (da - a * projection)
    b = rstd * (db - b * projection)
    tl.store(dx_at + pair[None, :] * dx_channel, a.to(dx_row.dtype.element_ty), mask=mask)
    tl.store(dx_at + (pair + pairs)[None, :] * dx_channel, b.to(dx_row.dtype.element_ty), mask=mask)
    if REST > 0:
        tl.store(dx_at + rest * dx_channel, (rstd * (dc - c * projection)).to(dx_row.dtype.element_ty), mask=c_mask)
    return a_sum, b_sum, c_sum


@triton.jit
def backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr,
    dqw_ptr, dkw_ptr, partial_ptr, arrived_ptr,
    q_eps, k_eps, length, q_heads, k_heads, blocks, head_dim, pairs, n_items, n_programs,
    g_q_batch, g_q_token, g_q_head, g_q_channel, g_k_batch, g_k_token, g_k_head, g_k_channel,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    dq_batch, dq_token, dq_head, dq_channel, dk_batch, dk_token, dk_head, dk_channel,
    cos_batch, cos_token, cos_channel, sin_batch, sin_token, sin_channel,
    OFFSET: tl.constexpr, NEEDS_DW: tl.constexpr, GROUP: tl.constexpr, WEIGHTS: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pair = arange(PAIRS, FAR)
    is_pair = pair < pairs
    REST_OR_ONE: tl.constexpr = REST if REST > 0 else 1
    rest = 2 * pairs + tl.arange(0, REST_OR_ONE)
    qa_weight, qb_weight = _weights(qw_ptr, pair, pairs, OFFSET)
    qc_weight = tl.load(qw_ptr + rest, mask=rest < head_dim, other=0.0).to(tl.float32) + OFFSET
    ka_weight, kb_weight = _weights(kw_ptr, pair, pairs, OFFSET)
    kc_weight = tl.load(kw_ptr + rest, mask=rest < head_dim, other=0.0).to(tl.float32) + OFFSET
    dqa = tl.zeros((PAIRS,), dtype=tl.float32)
    dqb = tl.zeros((PAIRS,), dtype=tl.float32)
    dqc = tl.zeros((REST_OR_ONE,), dtype=tl.float32)
    dka = tl.zeros((PAIRS,), dtype=tl.float32)
    dkb = tl.zeros((PAIRS,), dtype=tl.float32)
    dkc = tl.zeros((REST_OR_ONE,), dtype=tl.float32)
    for item in range(program, n_items, n_programs):
        row = (item // blocks).to(tl.int64)
        block = item % blocks
        batch = row // length
        token = row % length
        cos_a, cos_b = _halves(cos_ptr + batch * cos_batch + token * cos_token, cos_channel, pair, pairs, is_pair)
        sin_a, sin_b = _halves(sin_ptr + batch * sin_batch + token * sin_token, sin_channel, pair, pairs, is_pair)
        a, b, c = _turn_heads_back(
            dq_out_ptr + batch * g_q_batch + token * g_q_token, q_ptr + batch * q_batch + token * q_token,
            dq_ptr + batch * dq_batch + token * dq_token,
            qa_weight, qb_weight, qc_weight, cos_a, sin_a, cos_b, sin_b, q_eps, pair,
            block * Q_HEADS, q_heads, g_q_head, g_q_channel, q_head, q_channel, dq_head, dq_channel, head_dim, pairs,
            Q_HEADS, REST, FAR,
        )  # fmt: skip
        dqa += a
        dqb += b
        dqc += c
        a, b, c = _turn_heads_back(
            dk_out_ptr + batch * g_k_batch + token * g_k_token, k_ptr + batch * k_batch + token * k_token,
            dk_ptr + batch * dk_batch + token * dk_token,
            ka_weight, kb_weight, kc_weight, cos_a, sin_a, cos_b, sin_b, k_eps, pair,
            block * K_HEADS, k_heads, g_k_head, g_k_channel, k_head, k_channel, dk_head, dk_channel, head_dim, pairs,
            K_HEADS, REST, FAR,
        )  # fmt: skip
        dka += a
        dkb += b
        dkc += c
    if NEEDS_DW:  # both weights' gradients lie side by side
        q_sums = partial_ptr + program * (2 * head_dim)
        k_sums = q_sums + head_dim
        tl.store(q_sums + pair, dqa, mask=is_pair)
        tl.store(q_sums + pairs + pair, dqb, mask=is_pair)
        tl.store(k_sums + pair, dka, mask=is_pair)
        tl.store(k_sums + pairs + pair, dkb, mask=is_pair)
        if REST > 0:
            tl.store(q_sums + rest, dqc, mask=rest < head_dim)
            tl.store(k_sums + rest, dkc, mask=rest < head_dim)
        column = tl.arange(0, WEIGHTS)
        total, is_last = sum_of_programs(
            partial_ptr, arrived_ptr, program, n_programs, column, column < 2 * head_dim, 2 * head_dim, GROUP
        )
        if is_last:
            tl.store(dqw_ptr + column, total.to(dqw_ptr.dtype.element_ty), mask=column < head_dim)
            of_k = (column >= head_dim) & (column < 2 * head_dim)
            tl.store(dkw_ptr + column - head_dim, total.to(dkw_ptr.dtype.element_ty), mask=of_k)
