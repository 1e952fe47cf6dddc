"""Whether Triton multiplies matrices of a dtype where its programs are interpreted."""

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


@triton.jit
def _square(a, to, WIDTH: tl.constexpr):
    """``a @ a`` of ``[WIDTH, WIDTH]``."""
    place = tl.arange(0, WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(a + place)
    tl.store(to + place, tl.dot(value, value))
