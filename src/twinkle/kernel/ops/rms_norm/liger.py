"""The ``liger`` backend of ``rms_norm``: ``LigerRMSNormFunction``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.liger_support import call_reason, differentiable_once, launch, liger_function

if TYPE_CHECKING:
    from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
    from twinkle.kernel.targets import Site

available = functools.partial(liger_support.available, ("LigerRMSNormFunction",))

# Liger's name for where the result is cast. "gemma" does all in fp32 and rounds once; of "factor", which rounds the
# factor and the product, it is the better approximation.
_CASTING = {"before": "llama", "after": "gemma", "factor": "gemma"}


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class for one variant."""
    variant: RMSNormVariant = site.variant
    weight_name, eps_name, offset = variant.weight, variant.eps, variant.offset
    casting = _CASTING[variant.cast]
    function = differentiable_once(liger_function("LigerRMSNormFunction"))
    if weight_name is None:
        # Older versions need a weight, which no signature shows: a launch does.
        row = torch.ones(1, 8, device=site.device)
        launch(function, row, None, 1e-6, 0.0, casting, False)

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, weight_name) if weight_name else None
        # Not in place: that writes the input's gradient over the output's, which a residual branch may still need.
        return launch(function, hidden_states, weight, getattr(self, eps_name), offset, casting, False)

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        if weight_name is None:
            return call_reason(hidden_states)
        weight = getattr(self, weight_name)
        # With "before", a wider weight promotes the original's result; Liger's has the input's dtype.
        reason = call_reason(hidden_states, weight, one_dtype=casting == "llama")
        if reason is None and weight.shape[0] != hidden_states.shape[-1]:
            return "the weight isn't as wide as the input"
        return reason

    return layer("LigerRMSNorm", forward, accepts_call)
