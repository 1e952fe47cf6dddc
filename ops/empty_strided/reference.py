"""What ``empty_strided`` makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty_strided_reference(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """A CPU tensor of those sizes and strides over memory that reaches from its first element to its last."""
    empty = torch.empty(0, dtype=dtype)
    elements = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return empty.set_(torch.UntypedStorage(elements * empty.element_size()), 0, tuple(size), tuple(stride))
