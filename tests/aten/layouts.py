"""Tensors of every layout, for property tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides, offset."""


@st.composite
def layouts(draw: Any, shape: tuple[int, ...] | None = None, overlapping: bool = False, zeros: bool = True) -> Layout:
    """Any layout of up to six dimensions: in any order in memory, with gaps, and an offset.

    Args:
        shape: of this shape.
        overlapping: also dimensions that are expanded, or whose elements share memory.
        zeros: also without elements.
    """
    if shape is None:
        sizes = st.integers(0 if zeros and draw(st.integers(0, 9)) == 0 else 1, 5)
        shape = tuple(draw(st.lists(sizes, max_size=6)))
    strides = [0] * len(shape)
    step = draw(st.integers(1, 2))
    for dimension in draw(st.permutations(range(len(shape)))):
        strides[dimension] = step
        if overlapping and draw(st.integers(0, 5)) == 0:
            strides[dimension] = draw(st.integers(0, 2))
        step = max(step, strides[dimension]) * max(shape[dimension], 1) + draw(st.sampled_from((0, 0, 0, 1)))
    return shape, tuple(strides), draw(st.sampled_from((0, 0, 1, 3)))


def filled(layout: Layout, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """A tensor of that layout, its memory filled throughout; the same at each call, on each device."""
    shape, strides, offset = layout
    reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    generator = torch.Generator().manual_seed(math.prod(shape) + offset)
    memory = torch.randint(0, 2 if dtype is torch.bool else 100, (offset + reach + 2,), generator=generator).to(dtype)
    if dtype.is_complex:
        memory = memory * (1 + 2j)
    memory = memory.to(dtype).to(device)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return memory.as_strided(shape, strides, offset)
