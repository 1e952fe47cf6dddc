"""``clone`` by other operators of PyTorch."""

from __future__ import annotations

import torch

from twinkle.aten.strided import torch_copy


def clone_torch(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """See ``aten::clone``; the layout of the result is that of ``empty_like``."""
    return torch_copy(torch.empty_like(self, memory_format=memory_format or torch.preserve_format), self)
