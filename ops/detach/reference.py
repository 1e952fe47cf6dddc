"""What ``detach`` gives."""

from __future__ import annotations

import torch


def detach_reference(self: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory, of the same sizes, strides and offset, that requires no gradient."""
    empty = torch.empty(0, dtype=self.dtype)
    return empty.set_(self.untyped_storage(), self.storage_offset(), self.shape, self.stride())
