"""What ``embedding`` computes."""

from __future__ import annotations

import torch


def embedding_reference(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a CPU table.

    Args:
        weight: (rows, width).
        indices: int64 or int32 of any shape, each in [0, rows).
        padding_idx, scale_grad_by_freq, sparse: of the gradient only.

    Returns:
        (*indices.shape, width), contiguous.
    """
    rows = [weight[index] for index in indices.reshape(-1).tolist()]
    return torch.stack(rows).view(*indices.shape, weight.shape[1])
