"""The ``npu`` backend of ``rms_norm`` and ``gated_rms_norm``: torch_npu's fused norms in both directions.

``npu_rms_norm`` for ``w * h``, ``npu_gemma_rms_norm`` for ``(1 + w) * h``: adding 1 to a 16-bit weight first would lose
every ``|w|`` below ``2**-8``. Whether they round before or after the weight's product isn't published; both are within
the numerical judgement of either.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from twinkle.environment import switch
from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.npu_support import call_reason, npu_function
from twinkle.kernel.ops.rms_norm.layers import gated_norm_layer, norm_layer

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

IN_FP32 = "TWINKLE_NPU_GATED_RMSNorm_FP32"
"""The switch that makes both norms compute in fp32 whatever their inputs' dtype: more exact, more memory traffic."""

available = functools.partial(
    npu_support.available,
    {"npu_rms_norm": ("epsilon",), "npu_gemma_rms_norm": ("epsilon",), "npu_rms_norm_backward": ()},
)


class _Norm(torch.autograd.Function):
    """``x [..., H]`` normalised, times ``offset + weight``; a weight of ones where there is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        if offset:
            y, rstd = npu_function("npu_gemma_rms_norm")(x.contiguous(), weight, epsilon=eps)
        else:
            y, rstd = npu_function("npu_rms_norm")(x, weight, epsilon=eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = saved_tensors(ctx, "rms_norm by npu")
        # The one rounding of 1 + w is a factor on the gradient, and as small as the gradient's own rounding.
        gamma = (weight.float() + ctx.offset).to(weight.dtype) if ctx.offset else weight
        dx, dgamma = npu_function("npu_rms_norm_backward")(dy, x, gamma, rstd)
        return dx, dgamma.to(weight.dtype), None, None


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float, cast: str
) -> torch.Tensor:
    """The gate's product is PyTorch's, in fp32 as the original's."""
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if x.dtype != torch.float32 and switch(IN_FP32, False):
        normed = _Norm.apply(x.float(), weight.float(), eps, offset).to(x.dtype)
    else:
        normed = _Norm.apply(x, weight, eps, offset)
    return normed if gate is None else (normed * F.silu(gate.float())).to(x.dtype)  # type: ignore[no-any-return]


def _reason(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None) -> str | None:
    """Why a call can't be served. A wider weight promotes some originals' results, and would be rounded in others."""
    if gate is not None and gate.shape != x.shape:
        return "the gate's shape is not the input's"
    reason = call_reason(x, weight) or (gate is not None and call_reason(gate, one_dtype=False)) or None
    if reason is None and not 2 <= x.dim() <= 8:
        return "torch_npu's norms take 2 to 8 dimensions"
    if reason is None and weight is not None and weight.shape[0] != x.shape[-1]:
        return "the weight isn't as wide as the input"
    return reason


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of one variant."""
    return norm_layer("NpuRMSNorm", site.variant, _norm, _reason)


def load_gated(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of the gated norm."""
    return gated_norm_layer("NpuGatedRMSNorm", site.variant, _norm, _reason)
