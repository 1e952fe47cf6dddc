"""What ``_local_scalar_dense`` reads."""

from __future__ import annotations

import torch

from twinkle.aten.reference import read_number


def _local_scalar_dense_reference(self: torch.Tensor) -> bool | int | float | complex:
    """The element of a CPU tensor that has one, as the Python number of its kind."""
    return read_number(self)
