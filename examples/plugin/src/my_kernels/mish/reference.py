"""What ``mish`` computes."""

from __future__ import annotations

import torch


def mish_reference(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::mish``; of CPU tensors."""
    return torch.ops.aten.mish.default(self)
