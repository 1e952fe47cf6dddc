"""``result_type`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def result_type_torch(tensor: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """See ``aten::result_type``: what ``where`` makes of empty tensors that have dimensions where these have."""
    return torch.where(torch.empty(0, dtype=torch.bool), _like(tensor), _like(other)).dtype


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((0,) if tensor.dim() else (), dtype=tensor.dtype, device="cpu")
