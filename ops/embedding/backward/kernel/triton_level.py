"""``embedding_dense_backward`` in Triton: every row of the table is summed in one place, in one order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from twinkle.aten.launch import most_programs, program

from .programs import sum_rows

MOST_COLUMNS = 1024


def embedding_dense_backward_triton(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """See ``aten::embedding_dense_backward``. Half precision is summed in float32."""
    width, total = grad_output.shape[-1], indices.numel()
    grads = grad_output.reshape(-1, width)
    rows, positions = torch.sort(indices.reshape(-1), stable=True)
    ends = torch.searchsorted(rows, rows, right=True)
    result = torch.zeros(num_weights, width, dtype=grads.dtype, device=grads.device)
    numbers = width, padding_idx, total, *grads.stride()
    sum_up = _program(grads.dtype, rows.dtype, grads.device, numbers, scale_grad_by_freq)
    sum_up(result, grads, rows, positions, ends)
    return result


@functools.lru_cache(maxsize=4096)
def _program(
    dtype: torch.dtype, index_dtype: torch.dtype, device: torch.device, numbers: tuple[int, ...], mean: bool
) -> Callable[..., None]:
    """The launch for tensors of those dtypes on that device; ``numbers`` are the kernel's own."""
    width, _, total, *_ = numbers
    block = min(triton.next_power_of_2(width), MOST_COLUMNS)
    grid = min(total * math.ceil(width / block), most_programs(device))
    wide = tl.float64 if dtype is torch.float64 else tl.float32
    return program(sum_rows, grid, *numbers, MEAN=mean, WIDE=wide, BLOCK=block)
