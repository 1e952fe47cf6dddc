"""``empty_strided`` by other operators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinkle.aten.layouts import span


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
    memory = torch.empty(span(size, stride), dtype=dtype, device=device)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # so that it is no view of anything
        return memory.as_strided(size, stride)
