"""A product with a scalar in another dtype, by Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinkle.triton_programs import on_device

BLOCK = 4096


@triton.jit
def multiply_kernel(values_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """``out = values * factor``, computed in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(values_ptr + at, mask=at < size).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty), mask=at < size)


def multiply(values: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Writes ``values * factor`` into ``out``, all fp32, bf16 or fp16 and contiguous; ``factor`` is a scalar."""
    size = values.numel()
    if size:
        with on_device(values):
            multiply_kernel[(triton.cdiv(size, BLOCK),)](values, factor, out, size, BLOCK=BLOCK, num_warps=8)
