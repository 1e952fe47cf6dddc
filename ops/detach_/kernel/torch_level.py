"""``detach_`` below autograd."""

from __future__ import annotations

import torch


def detach__torch(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::detach_``, for a tensor without a history: the tensor itself."""
    return self
