"""``embedding`` in Triton."""

from __future__ import annotations

import math

import torch
import triton

from twinkle.aten.launch import launch, reinterpret
from twinkle.aten.strided import INTEGERS, MOST_PROGRAMS

from .programs import gather_rows

MOST_COLUMNS = 4096


def embedding_triton(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """See ``aten::embedding``. It moves bits; every index must be a row of the table."""
    rows, width = weight.shape
    result = torch.empty(*indices.shape, width, dtype=weight.dtype, device=weight.device)
    integer = INTEGERS[weight.element_size()]
    block = min(triton.next_power_of_2(width), MOST_COLUMNS)
    grid = min(indices.numel() * math.ceil(width / block), MOST_PROGRAMS)
    pointers = reinterpret(result, integer), reinterpret(weight, integer), indices.reshape(-1).contiguous()
    numbers = rows, width, *weight.stride(), indices.numel()
    launch(gather_rows, weight.device, grid, *pointers, *numbers, BLOCK=block)
    return result
