"""The Triton program of ``scaled_dot_product_attention``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(left, right, DOUBLE: tl.constexpr):
    if DOUBLE:  # chosen while compiling: the other isn't made
        return tl.sum(left[:, :, None] * right[None, :, :], 1)
    else:
        return tl.dot(left, right, input_precision="ieee")


@triton.jit
def attend(
    to,
    query,
    key,
    value,
    mask,
    to_strides,
    query_strides,
    key_strides,
    value_strides,
    mask_strides,
    blocks,
    heads,
    group,
    queries,
    keys,
    width,
    out_width,
    total,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOUBLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    ONCE: tl.constexpr,
):
    """A block of queries of one head per turn.

    Of the scores seen so far, ``most`` is the largest of each query, ``together`` the sum of their exponentials beside
    it, ``summed`` the values weighted with those: when a larger score comes, both are scaled down. ``MASK`` is 0 for
    none, 1 for what is seen, 2 for what is added. ``ONCE`` says that there are as many programs as blocks, ``total`` in
    all: the compiler drops the loop. Otherwise the last turn may lie beyond the work, and is the last block once more.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    for i in range(1 if ONCE else tl.cdiv(total, tl.num_programs(0))):
        program = tl.minimum(tl.program_id(0).to(tl.int64) + i * tl.num_programs(0), total - 1)
        block = program % blocks
        head = program // blocks % heads
        batch = program // blocks // heads

        row = block * ROWS + tl.arange(0, ROWS)
        depth = tl.arange(0, WIDTH)
        out_depth = tl.arange(0, OUT_WIDTH)
        q_at = batch * query_strides[0] + head * query_strides[1]
        q_at += row[:, None] * query_strides[2] + depth[None, :] * query_strides[3]
        q = tl.load(query + q_at, mask=(row[:, None] < queries) & (depth[None, :] < width), other=0)

        key_at = key + batch * key_strides[0] + head // group * key_strides[1]
        value_at = value + batch * value_strides[0] + head // group * value_strides[1]
        most = tl.full((ROWS,), float("-inf"), WIDE)
        together = tl.zeros((ROWS,), WIDE)
        summed = tl.zeros((ROWS, OUT_WIDTH), WIDE)
        end = keys
        if CAUSAL:
            end = tl.minimum(keys, (block + 1).to(tl.int32) * ROWS)
        for start in range(0, end, COLUMNS):
            column = (start + tl.arange(0, COLUMNS)).to(tl.int64)
            k_at = depth[:, None] * key_strides[3] + column[None, :] * key_strides[2]
            k = tl.load(key_at + k_at, mask=(depth[:, None] < width) & (column[None, :] < keys), other=0)
            scores = _product(q, k, DOUBLE) * SCALE
            seen = (row[:, None] < queries) & (column[None, :] < keys)
            if CAUSAL:
                seen = seen & (column[None, :] <= row[:, None])
            if MASK > 0:
                mask_at = batch * mask_strides[0] + head * mask_strides[1]
                mask_at += row[:, None] * mask_strides[2] + column[None, :] * mask_strides[3]
                given = tl.load(mask + mask_at, mask=seen, other=0)
                if MASK == 1:
                    seen = seen & (given != 0)
                else:
                    scores += given.to(WIDE)
            scores = tl.where(seen, scores, float("-inf"))
            larger = tl.maximum(most, tl.max(scores, 1))
            beside = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp(scores - beside[:, None])
            less = tl.exp(most - beside)
            v_at = column[:, None] * value_strides[2] + out_depth[None, :] * value_strides[3]
            v = tl.load(value_at + v_at, mask=(column[:, None] < keys) & (out_depth[None, :] < out_width), other=0)
            summed = summed * less[:, None] + _product(weights.to(v.dtype), v, DOUBLE)
            together = together * less + tl.sum(weights, 1)
            most = larger

        summed = summed / tl.where(together == 0, 1.0, together)[:, None]
        to_at = batch * to_strides[0] + head * to_strides[1]
        to_at += row[:, None] * to_strides[2] + out_depth[None, :] * to_strides[3]
        inside = (row[:, None] < queries) & (out_depth[None, :] < out_width)
        tl.store(to + to_at, summed.to(to.dtype.element_ty), mask=inside)
