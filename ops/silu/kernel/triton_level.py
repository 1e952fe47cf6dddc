"""``silu`` in Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from twinkle.aten.launch import most_programs, program

from .programs import silu_elements

BLOCK = 1024


def silu_triton(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::silu``, for a tensor whose elements lie side by side."""
    result = torch.empty_like(self)
    _program(self.dtype, self.device, self.numel())(result, self)
    return result


@functools.lru_cache(maxsize=4096)
def _program(dtype: torch.dtype, device: torch.device, total: int) -> Callable[..., None]:
    """The launch for tensors of that dtype on that device."""
    return program(silu_elements, min(math.ceil(total / BLOCK), most_programs(device)), total, BLOCK=BLOCK)
