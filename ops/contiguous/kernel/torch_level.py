"""``contiguous`` by other operators of PyTorch."""

from __future__ import annotations

import torch

from twinkle.aten.strided import torch_copy


def contiguous_torch(
    self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """See ``aten::contiguous``, for a tensor that isn't yet."""
    return torch_copy(torch.empty_like(self, memory_format=memory_format), self)
