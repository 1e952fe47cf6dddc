"""``contiguous`` by the strided copy in Triton."""

from __future__ import annotations

import torch

from twinkle.aten.strided import triton_copy


def contiguous_triton(
    self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """See ``aten::contiguous``, for a tensor that isn't yet."""
    return triton_copy(torch.empty_like(self, memory_format=memory_format), self)
