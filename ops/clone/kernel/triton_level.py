"""``clone`` by the strided copy in Triton."""

from __future__ import annotations

import torch

from twinkle.aten.strided import triton_copy


def clone_triton(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """See ``aten::clone``; the layout of the result is that of ``empty_like``."""
    return triton_copy(torch.empty_like(self, memory_format=memory_format or torch.preserve_format), self)
