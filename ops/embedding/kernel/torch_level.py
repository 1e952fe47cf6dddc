"""``embedding`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def embedding_torch(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """See ``aten::embedding``. An index out of range raises an IndexError."""
    return weight.index_select(0, indices.reshape(-1)).view(*indices.shape, weight.shape[1])


def embedding_pullback(
    grad: torch.Tensor,
    shape: torch.Size,
    indices: torch.Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> tuple[torch.Tensor]:
    """The gradient of ``weight``, from its shape: sparse where that is asked for, else our kernel's again."""
    return (torch.ops.aten.embedding_backward(grad, indices, shape[0], padding_idx, scale_grad_by_freq, sparse),)
