"""What ``copy_`` computes."""

from __future__ import annotations

import torch

from twinkle.aten.reference import copy_by_address


def copy__reference(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Makes the elements of ``self`` those of ``src``, both on the CPU, and returns ``self``.

    Args:
        self: no two elements share memory.
        src: broadcast to the shape and converted to the dtype of ``self``.
        non_blocking: means nothing on the CPU.
    """
    copy_by_address(self, src.to(self.dtype).expand(self.shape))
    return self
