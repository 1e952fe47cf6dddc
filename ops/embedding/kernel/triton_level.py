"""``embedding`` in Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton

from twinkle.aten.launch import most_programs, program
from twinkle.aten.strided import INTEGERS

from .programs import gather_rows

LEAST_ELEMENTS = 2048
"""Of a program, which gathers several rows where they are shorter."""
MOST_COLUMNS = 4096
"""Of a program, which gathers a part of a row where it is longer."""


def embedding_triton(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """See ``aten::embedding``. It moves bits; every index must be a row of the table."""
    result = torch.empty(*indices.shape, weight.shape[1], dtype=weight.dtype, device=weight.device)
    indices = indices if indices.is_contiguous() else indices.contiguous()
    gather = _program(weight.dtype, indices.dtype, weight.device, weight.shape, weight.stride(), indices.numel())
    gather(result, weight, indices)
    return result


@functools.lru_cache(maxsize=4096)
def _program(
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    strides: tuple[int, int],
    total: int,
) -> Callable[..., None]:
    """The launch for a table of that layout and so many indices, on that device."""
    entries, width = shape
    columns = min(triton.next_power_of_2(width), MOST_COLUMNS)
    rows = max(1, LEAST_ELEMENTS // columns)
    grid = min(math.ceil(total / rows) * math.ceil(width / columns), most_programs(device))
    numbers, views = (entries, width, *strides, total), (INTEGERS[dtype.itemsize],) * 2
    return program(gather_rows, grid, *numbers, views=views, ROWS=rows, COLUMNS=columns)
