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
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.npu_support import call_reason, npu_function

if TYPE_CHECKING:
    from twinkle.kernel.ops.rms_norm.gated_reference import GatedRMSNormVariant
    from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
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


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if x.dtype != torch.float32 and switch(IN_FP32, False):
        return _Norm.apply(x.float(), weight.float(), eps, offset).to(x.dtype)  # type: ignore[no-any-return]
    return _Norm.apply(x, weight, eps, offset)  # type: ignore[no-any-return]


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of one variant."""
    variant: RMSNormVariant = site.variant
    weight_name, eps_name, offset = variant.weight, variant.eps, variant.offset

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, weight_name) if weight_name else None
        return _norm(hidden_states, weight, getattr(self, eps_name), offset)

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        return _refusal(hidden_states, getattr(self, weight_name) if weight_name else None)

    return layer("NpuRMSNorm", forward, accepts_call)


def load_gated(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of the gated norm; the gate's product is PyTorch's, in fp32 as the original's."""
    variant: GatedRMSNormVariant = site.variant
    weight_name, eps_name = variant.weight, variant.eps

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = _norm(hidden_states, getattr(self, weight_name), getattr(self, eps_name))
        return normed if gate is None else (normed * F.silu(gate.float())).to(hidden_states.dtype)

    def accepts_call(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> str | None:
        if gate is not None and gate.shape != hidden_states.shape:
            return "the gate's shape is not the input's"
        return _refusal(hidden_states, getattr(self, weight_name), gate)

    return layer("NpuGatedRMSNorm", forward, accepts_call)


def _refusal(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None = None) -> str | None:
    """Why a call can't be served. A wider weight promotes some originals' results, and would be rounded in others."""
    reason = call_reason(x, weight) or (gate is not None and call_reason(gate, one_dtype=False)) or None
    if reason is None and not 2 <= x.dim() <= 8:
        return "torch_npu's norms take 2 to 8 dimensions"
    if reason is None and weight is not None and weight.shape[0] != x.shape[-1]:
        return "the weight isn't as wide as the input"
    return reason
