"""``_local_scalar_dense`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def _local_scalar_dense_torch(self: torch.Tensor) -> bool | int | float | complex:
    """See ``aten::_local_scalar_dense``. A list is read from the host's memory, with no operator but a copy."""
    (number,) = self.reshape(1).tolist()
    return number
