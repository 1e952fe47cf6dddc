"""What ``empty`` makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinkle.aten.reference import strides_like


def empty_reference(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """A CPU tensor of those sizes over memory that its elements fill, by default the last dimension innermost."""
    empty = torch.empty_strided((0,), (1,), dtype=dtype)
    shape = torch.empty_strided(tuple(size), [0] * len(size), device="meta")
    strides = strides_like(shape, memory_format or torch.contiguous_format)
    return empty.set_(torch.UntypedStorage(shape.numel() * empty.element_size()), 0, shape.shape, strides)
