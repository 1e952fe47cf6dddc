"""Backends ``triton`` and ``torch``: :func:`twinkle.loss.linear_cross_entropy`, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twinkle.kernel.ops.triton_support import launchable
from twinkle.loss import linear_cross_entropy


def load_triton(target: Any) -> Callable[..., torch.Tensor]:
    """The losses of a chunk by a Triton program, which overwrites the logits by their gradient."""
    return _by_triton


def load_torch(target: Any) -> Callable[..., torch.Tensor]:
    """The losses of a chunk by the formula written out, on any device."""
    return _by_torch


def _by_triton(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return linear_cross_entropy(x, weight, target, backend="triton", **options)


def _by_torch(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return linear_cross_entropy(x, weight, target, backend="torch", **options)


def _not_for_triton(x: torch.Tensor, *args: Any, **options: Any) -> str | None:
    if not launchable(x.device):
        return f"the tensors are on {x.device.type}, which Triton doesn't run on"
    return "the dtype is fp64" if x.dtype == torch.float64 else None


_by_triton.accepts_call = _not_for_triton  # type: ignore[attr-defined]
