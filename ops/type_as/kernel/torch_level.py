"""``type_as`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def type_as_torch(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """See ``aten::type_as``, for two dtypes on one device; the layout of the result is that of ``empty_like``."""
    return torch.empty_like(self, dtype=other.dtype).copy_(self)
