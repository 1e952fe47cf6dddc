"""``empty_like`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def empty_like_torch(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """See ``aten::empty_like``."""
    strides = _strides(self, memory_format or torch.preserve_format)
    return torch.empty_strided(self.shape, strides, dtype=dtype or self.dtype, device=device or self.device)


def _strides(tensor: torch.Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    if memory_format is torch.preserve_format and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")  # it has no memory, so nothing is lost
    return torch.empty_like(like, memory_format=memory_format).stride()
