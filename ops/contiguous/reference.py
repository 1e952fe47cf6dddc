"""What ``contiguous`` computes."""

from __future__ import annotations

import torch

from twinkle.aten.reference import copy_by_address


def contiguous_reference(
    self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """A CPU tensor itself where its elements lie as asked for, else a copy in which they do."""
    if self.is_contiguous(memory_format=memory_format):
        return self
    result = torch.empty_like(self, memory_format=memory_format)
    copy_by_address(result, self)
    return result
