"""What calls each operator, as a program would: a differentiable function of a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "copy_": lambda x: (x.new_zeros(x.shape) * 1).copy_(x),
    "contiguous": lambda x: x.transpose(-1, -2).contiguous(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "empty_strided": lambda x: x + torch.empty_strided(x.shape, (1, x.shape[0]), device=x.device).zero_(),
}
