"""``item`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def item_torch(self: torch.Tensor) -> bool | int | float | complex:
    """See ``aten::item``, for a tensor of one element."""
    return torch.ops.aten._local_scalar_dense(self)
