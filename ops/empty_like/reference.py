"""What ``empty_like`` makes."""

from __future__ import annotations

import torch

from twinkle.aten.reference import strides_like


def empty_like_reference(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """A CPU tensor of the sizes of ``self`` over memory that its elements fill.

    Args:
        self: any shape, strides and dtype.
        dtype: that of ``self`` when left out.
        memory_format: where its elements lie; None keeps the order of the dimensions in the memory of ``self``.
    """
    empty = torch.empty(0, dtype=dtype or self.dtype)
    memory = torch.UntypedStorage(self.numel() * empty.element_size())
    return empty.set_(memory, 0, self.shape, strides_like(self, memory_format or torch.preserve_format))
