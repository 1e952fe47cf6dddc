"""What ``clone`` computes."""

from __future__ import annotations

import torch

from twinkle.aten.reference import copy_by_address


def clone_reference(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """The elements of a CPU tensor in memory of their own.

    Args:
        self: any shape, strides and dtype.
        memory_format: the layout of the result; None keeps that of ``self`` where no element is left out or shared.
    """
    result = torch.empty_like(self, memory_format=memory_format or torch.preserve_format)
    copy_by_address(result, self)
    return result
