"""What Triton computes rightly where its programs are interpreted: products of a dtype, conversions to bfloat16."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether ``tl.dot`` gives products on a CPU. Triton 3.6's interpreter keeps bfloat16 as integers of 16 bits, and
    multiplies those."""
    ones, found = torch.ones(16, 16, dtype=dtype), torch.empty(16, 16)
    _square[(1,)](ones, found, WIDTH=16)
    return bool((found.numpy() == 16).all())  # by numpy, since operators of PyTorch may be the ones in question


@functools.cache
def rounds() -> bool:
    """Whether a number becomes the nearest bfloat16. Triton 3.6's interpreter cuts off what it has no room for."""
    number, found = torch.full((1,), 1 + 2**-8 + 2**-9), torch.empty(1, dtype=torch.bfloat16)
    _convert[(1,)](number, found)
    return bool(found.view(torch.int16).numpy()[0] == 0x3F81)  # by numpy, as above: 1 + 2**-7


@triton.jit
def _convert(a, to):
    """``to[0] = a[0]``."""
    tl.store(to, tl.load(a).to(to.dtype.element_ty))


@triton.jit
def _square(a, to, WIDTH: tl.constexpr):
    """``a @ a`` of ``[WIDTH, WIDTH]``."""
    place = tl.arange(0, WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(a + place)
    tl.store(to + place, tl.dot(value, value))
