"""The layer of the backend ``mine``."""

from __future__ import annotations

import torch
from torch import nn


class MyRMSNorm(nn.Module):
    """It brings no ``__init__``: it takes the place of a live norm, whose attributes it finds."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``weight * x / rms(x)``, with the statistics in fp32; any shape ``[..., H]``."""
        eps = getattr(self, "variance_epsilon", None) or self.eps
        wide = hidden_states.float()
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).unsqueeze(-1) / wide.shape[-1] + eps)
        return self.weight * (wide * scale).to(hidden_states.dtype)
