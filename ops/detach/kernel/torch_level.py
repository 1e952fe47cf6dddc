"""``detach`` by other operators of PyTorch."""

from __future__ import annotations

import torch


def detach_torch(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::detach``: below autograd, which cuts the history and shares the version, it is ``aten::alias``."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.ops.aten.alias(self)
