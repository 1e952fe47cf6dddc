"""``embedding_dense_backward`` in Triton: every row of the table is summed in one place, in one order."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from twinkle.aten.launch import launch
from twinkle.aten.strided import MOST_PROGRAMS

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
    block = min(triton.next_power_of_2(width), MOST_COLUMNS)
    grid = min(total * math.ceil(width / block), MOST_PROGRAMS)
    numbers = width, padding_idx, total, *grads.stride()
    wide = tl.float64 if grads.dtype is torch.float64 else tl.float32
    constants = {"MEAN": scale_grad_by_freq, "WIDE": wide, "BLOCK": block}
    launch(sum_rows, grads.device, grid, result, grads, rows, positions, ends, *numbers, **constants)
    return result
