"""``silu`` in Triton."""

from __future__ import annotations

import math

import torch

from twinkle.aten.launch import launch
from twinkle.aten.strided import BLOCK, MOST_PROGRAMS

from .programs import silu_elements


def silu_triton(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::silu``, for a tensor whose elements lie side by side."""
    result = torch.empty_like(self)
    grid = min(math.ceil(self.numel() / BLOCK), MOST_PROGRAMS)
    launch(silu_elements, self.device, grid, result, self, self.numel(), BLOCK=BLOCK)
    return result
