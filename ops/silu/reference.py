"""What ``silu`` computes."""

from __future__ import annotations

import torch


def silu_reference(self: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of every element of a CPU tensor. See "Gaussian Error Linear Units", arXiv:1606.08415."""
    return self / (1 + (-self).exp())
