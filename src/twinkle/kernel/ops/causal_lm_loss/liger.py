"""Backend ``liger``: Liger's fused linear cross-entropy, with the weight's gradient summed up in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.liger_support import differentiable_once, launch, liger_function

_FUNCTION = "LigerFusedLinearCrossEntropyFunction"

available = functools.partial(liger_support.available, (_FUNCTION,))


def load(target: Any) -> Callable[..., torch.Tensor]:
    """A function as :mod:`twinkle.kernel.ops.causal_lm_loss.reference` has it."""
    function = differentiable_once(liger_function(_FUNCTION))

    def loss(
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        options = (class_weight, ignore_index, 0.0, label_smoothing, reduction, softcap, False, torch.float32)
        found: torch.Tensor = launch(function, x, weight, target, bias, *options)[0]
        # It is of the inputs' dtype; transformers' is fp32. What was rounded stays so.
        return found.float()

    loss.accepts_call = _accepts_call  # type: ignore[attr-defined]
    return loss


def _accepts_call(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, scale: float = 1.0, **options: Any
) -> str | None:
    if scale != 1.0:
        return "Liger's loss doesn't scale logits"
    autocast = torch.is_autocast_enabled(x.device.type)
    if (torch.get_autocast_dtype(x.device.type) if autocast else x.dtype) == torch.float16:
        return "Liger's loss divides its gradients by the number of tokens before a scaler's factor saves them in fp16"
    if weight.requires_grad and not x.requires_grad:
        return "Liger's loss gives the head no gradient where its input gets none"
    return liger_support.call_reason(x, weight, one_dtype=not autocast)
