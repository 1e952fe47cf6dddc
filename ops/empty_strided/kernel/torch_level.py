"""``empty_strided`` by other operators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty_strided_torch(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """See ``aten::empty_strided``."""
    elements = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    memory = torch.empty(elements, dtype=dtype, device=device)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # so that it is no view of anything
        return memory.as_strided(size, stride)
