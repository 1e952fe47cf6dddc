"""What ``embedding_dense_backward`` computes."""

from __future__ import annotations

import torch


def embedding_dense_backward_reference(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Of each row of the table, the sum of the gradients of the places where it was taken; on the CPU.

    Args:
        grad_output: (*indices.shape, width).
        indices: of any shape, each in [0, num_weights).
        padding_idx: the row that gets no gradient.
        scale_grad_by_freq: a row gets the mean of the gradients, not their sum.
    """
    rows = torch.arange(num_weights)
    taken = (rows[:, None] == indices.reshape(-1)[None, :]) & (rows != padding_idx)[:, None]
    result = taken.to(grad_output.dtype) @ grad_output.reshape(-1, grad_output.shape[-1])
    return result / taken.sum(1, keepdim=True).clamp(min=1) if scale_grad_by_freq else result
