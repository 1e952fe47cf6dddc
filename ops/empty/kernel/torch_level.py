"""``empty`` by other operators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty_torch(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """See ``aten::empty``. A meta tensor, which has no memory, tells the strides."""
    strides = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
    return torch.empty_strided(tuple(size), strides, dtype=dtype, device=device)
