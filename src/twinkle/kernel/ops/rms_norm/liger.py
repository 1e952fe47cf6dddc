"""The ``liger`` backend of ``rms_norm``: ``LigerRMSNormFunction``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.liger_support import call_reason, differentiable_once, launch, liger_function
from twinkle.kernel.ops.rms_norm.layers import norm_layer

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
    casting = _CASTING[variant.cast]
    function = differentiable_once(liger_function("LigerRMSNormFunction"))
    if variant.weight is None:
        # Older versions need a weight, which no signature shows: a launch does.
        row = torch.ones(1, 8, device=site.device)
        launch(function, row, None, 1e-6, 0.0, casting, False)

    def norm(x: torch.Tensor, weight: Any, gate: Any, eps: float, offset: float, cast: str) -> torch.Tensor:
        # Not in place: that writes the input's gradient over the output's, which a residual branch may still need.
        return launch(function, x, weight, eps, offset, casting, False)  # type: ignore[no-any-return]

    def reason(x: torch.Tensor, weight: torch.Tensor | None, gate: Any) -> str | None:
        if weight is None:
            return call_reason(x)
        # With "before", a wider weight promotes the original's result; Liger's has the input's dtype.
        why = call_reason(x, weight, one_dtype=casting == "llama")
        if why is None and weight.shape[0] != x.shape[-1]:
            return "the weight isn't as wide as the input"
        return why

    return norm_layer("LigerRMSNorm", variant, norm, reason)
