"""One Triton program rotates all heads of query and key of one token: cos and sin are read once.

The backward is the same program with the angle turned round; nothing of query and key is kept for it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _range(SIZE: tl.constexpr, FAR: tl.constexpr):
    numbers = tl.arange(0, SIZE)
    if FAR:  # times a stride they pass 32 bits
        numbers = numbers.to(tl.int64)
    return numbers


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos_a, sin_a, cos_b, sin_b, heads, x_head, x_channel, y_head, y_channel,
    head_dim, pairs, start,
    FIRST_IN: tl.constexpr, STEP_IN: tl.constexpr, FIRST_OUT: tl.constexpr, STEP_OUT: tl.constexpr,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Rotates ``heads`` rows; channel ``a`` of pair i is ``start + i * STEP``, ``b`` is ``FIRST`` further on."""
    pair = _range(PAIRS, FAR)
    for first in range(0, heads, HEADS):
        head = first + _range(HEADS, FAR)
        mask = (head < heads)[:, None] & (pair < pairs)[None, :]
        x_row = x_ptr + head[:, None] * x_head
        y_row = y_ptr + head[:, None] * y_head
        in_a = start + pair * STEP_IN
        out_a = start + pair * STEP_OUT
        a = tl.load(x_row + in_a[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_row + (in_a + FIRST_IN)[None, :] * x_channel, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            rotated_a = a * cos_a[None, :] + b * sin_b[None, :]
            rotated_b = b * cos_b[None, :] - a * sin_a[None, :]
        else:
            rotated_a = a * cos_a[None, :] - b * sin_a[None, :]
            rotated_b = b * cos_b[None, :] + a * sin_b[None, :]
        element = y_ptr.dtype.element_ty
        tl.store(y_row + out_a[None, :] * y_channel, rotated_a.to(element), mask=mask)
        tl.store(y_row + (out_a + FIRST_OUT)[None, :] * y_channel, rotated_b.to(element), mask=mask)
        if REST > 0:
            # Channels that don't rotate: all but [start, start + 2 * pairs).
            rest = _range(REST, FAR)
            channel = tl.where(rest < start, rest, rest + 2 * pairs)
            rest_mask = (head < heads)[:, None] & (channel < head_dim)[None, :]
            passed = tl.load(x_row + channel[None, :] * x_channel, mask=rest_mask, other=0.0)
            tl.store(y_row + channel[None, :] * y_channel, passed.to(element), mask=rest_mask)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr,
    length, q_heads, k_heads, head_dim, pairs, start,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    qo_batch, qo_token, qo_head, qo_channel, ko_batch, ko_token, ko_head, ko_channel,
    cos_batch, cos_token, cos_channel, sin_batch, sin_token, sin_channel,
    FIRST_IN: tl.constexpr, STEP_IN: tl.constexpr, FIRST_OUT: tl.constexpr, STEP_OUT: tl.constexpr,
    TABLE_STEP: tl.constexpr, TABLE_B: tl.constexpr, BACKWARD: tl.constexpr, HAS_K: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The table's entry of pair i is ``i * TABLE_STEP`` for channel a and ``TABLE_B`` further on for channel b."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // length
    token = program % length
    pair = _range(PAIRS, FAR)
    in_table = pair < pairs
    at = pair * TABLE_STEP
    cos_row = cos_ptr + batch * cos_batch + token * cos_token
    sin_row = sin_ptr + batch * sin_batch + token * sin_token
    cos_a = tl.load(cos_row + at * cos_channel, mask=in_table, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_row + at * sin_channel, mask=in_table, other=0.0).to(tl.float32)
    if TABLE_B == 0:
        cos_b = cos_a
        sin_b = sin_a
    else:
        cos_b = tl.load(cos_row + (at + TABLE_B) * cos_channel, mask=in_table, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_row + (at + TABLE_B) * sin_channel, mask=in_table, other=0.0).to(tl.float32)
    _rotate_heads(
        q_ptr + batch * q_batch + token * q_token, q_out_ptr + batch * qo_batch + token * qo_token,
        cos_a, sin_a, cos_b, sin_b, q_heads, q_head, q_channel, qo_head, qo_channel, head_dim, pairs, start,
        FIRST_IN, STEP_IN, FIRST_OUT, STEP_OUT, BACKWARD, Q_HEADS, PAIRS, REST, FAR,
    )  # fmt: skip
    if HAS_K:
        _rotate_heads(
            k_ptr + batch * k_batch + token * k_token, k_out_ptr + batch * ko_batch + token * ko_token,
            cos_a, sin_a, cos_b, sin_b, k_heads, k_head, k_channel, ko_head, ko_channel, head_dim, pairs, start,
            FIRST_IN, STEP_IN, FIRST_OUT, STEP_OUT, BACKWARD, K_HEADS, PAIRS, REST, FAR,
        )  # fmt: skip
