"""Triton programs of ``activation(gate) * up``: one pass forward, one pass backward that recomputes the activation."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
CUBIC = tl.constexpr(0.044715)
LARGEST = tl.constexpr(3.0e38)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The activation and its derivative, in fp32."""
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(x * SQRT_HALF))
        value = x * cdf
        slope = cdf + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    else:  # x * sigmoid(z): (1 + tanh(y)) / 2 is sigmoid(2 y)
        if ACTIVATION == "silu":
            z = x
            dz = 1.0
        else:
            z = 2.0 * SQRT_2_OVER_PI * x * (1.0 + CUBIC * x * x)
            dz = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
        e = tl.exp(-z)
        share = 1.0 / (1.0 + e)
        rest = tl.minimum(e, LARGEST) * share  # 1 - share, but nothing cancels; where e is inf, share is 0
        value = x * share
        slope = share + value * rest * dz
    return value, slope


@triton.jit
def forward_kernel(
    gate_ptr, up_ptr, out_ptr, width, blocks, gate_stride, up_stride, out_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    loaded = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0)
    value, _ = _activate(loaded.to(tl.float32), ACTIVATION)
    out = value.to(loaded.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, width, blocks,
    grad_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activate(gate, ACTIVATION)
    tl.store(dgate_ptr + row * dgate_stride + columns, (grad * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * dup_stride + columns, (grad * value).to(dup_ptr.dtype.element_ty), mask=mask)
