"""``embedding_dense_backward`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def embedding_dense_backward_torch(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """See ``aten::embedding_dense_backward``. Half precision is summed in float32."""
    width, places = grad_output.shape[-1], indices.reshape(-1)
    rows = grad_output.reshape(-1, width)
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    result = torch.zeros(num_weights, width, dtype=wide, device=rows.device)
    kept = torch.where((places == padding_idx)[:, None], 0, rows.to(wide))
    result.index_add_(0, places, kept)
    if scale_grad_by_freq:
        result /= torch.bincount(places, minlength=num_weights).clamp(min=1)[:, None]
    return result.to(rows.dtype)


def embedding_dense_backward_pullback(
    grad: torch.Tensor,
    shape: torch.Size,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[torch.Tensor]:
    """The gradient of ``grad_output``, from its shape, as PyTorch gives it: it leaves the frequency out."""
    places = indices.reshape(-1)
    rows = torch.where((places == padding_idx)[:, None], 0, grad.index_select(0, places))
    return (rows.view(shape),)
