"""Scaling a gradient in its own memory, and narrowing it on the way: a head's is too large to be there twice."""

from __future__ import annotations

import torch

from twinkle.loss.token_losses import Backend


def scaled_in_place(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, backend: Backend) -> torch.Tensor:
    """The product in a dtype that is as wide or narrower, in the gradient's own memory, whose values are lost.

    Args:
        gradient: contiguous.
        factor: a scalar, not rounded to the gradient's dtype.
    """
    wide = gradient.view(-1)
    narrow = wide.view(dtype)[: wide.numel()]
    if dtype == gradient.dtype:
        _multiply(wide, factor, narrow, backend)
        return gradient
    # What is written must have been read before, and not lie in what is read at the same time: a narrower result ends
    # before the place where its inputs begin, if it is at most as long as what was written before it.
    done = min(wide.numel(), 2**20)
    narrow[:done] = wide[:done] * factor
    while done < wide.numel():
        part = slice(done, 2 * done)
        _multiply(wide[part], factor, narrow[part], backend)
        done *= 2
    return narrow.view(gradient.shape)


def _multiply(values: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, backend: Backend) -> None:
    if backend == "triton":  # a third of the time that PyTorch takes between two dtypes
        from twinkle.loss.triton_scaling import multiply

        multiply(values, factor, out)
    else:
        torch.mul(values, factor.reshape((1,)), out=out)
