"""``torch`` backend of ``rms_norm`` and ``gated_rms_norm``, in the formulation that is fastest where a call runs.

On an accelerator ``torch.nn.functional.rms_norm`` is one kernel in each direction. On a CPU it is the same sequence of
passes as the original, most of whose time goes into fresh temporaries; there an autograd.Function that keeps the input
and one number per row, and works in place on what it owns, takes about half the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.kernel.ops.rms_norm.gated_reference import gated_rms_norm
from twinkle.kernel.ops.rms_norm.layers import CallReason, gated_norm_layer, norm_layer
from twinkle.kernel.ops.rms_norm.reference import rms_norm
from twinkle.kernel.ops.torch_support import not_faster, transformed
from twinkle.kernel.ops.worthwhile import slower_for
from twinkle.naming import dtype_name
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

# --- F.rms_norm -------------------------------------------------------------------------------------------------------


def fused(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """``F.rms_norm``; statistics and product in fp32, rounded once."""
    normed = _fused_norm(x, weight, eps, offset)
    return normed if gate is None else (normed * F.silu(gate.to(_wide(x)))).to(x.dtype)


def _fused_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    width = x.shape[-1:]
    if weight is None or not offset:
        return F.rms_norm(x, width, weight, eps)
    # 1 + w in bf16 loses every |w| below 2**-8, and so does h + h * w with an h in bf16: all of it has to be fp32.
    wide = _wide(x)
    return F.rms_norm(x.to(wide), width, _scale(weight, wide, offset), eps).to(x.dtype)


def refuse_fused(x: torch.Tensor) -> str | None:
    """Autocast makes ``F.rms_norm`` compute and return fp32."""
    if x.element_size() < 4 and torch.is_autocast_enabled(x.device.type):
        return f"autocast would turn F.rms_norm's {dtype_name(x.dtype)} into float32"
    return None


# --- few passes -------------------------------------------------------------------------------------------------------


def few_passes(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    """The norm with as few temporaries as PyTorch's elementwise operators allow; computed in fp32, rounded once."""
    if torch.is_grad_enabled():
        return _FewPasses.apply(x, weight, gate, eps, offset)
    return _forward(x, weight, gate, eps, offset)[0]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale(weight: torch.Tensor, wide: torch.dtype, offset: float) -> torch.Tensor:
    return weight.to(wide) + offset if offset else weight.to(wide)


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and ``rsqrt(mean(x^2) + eps)`` as ``[..., 1]`` in fp32 (fp64 for fp64)."""
    wide = _wide(x)
    h = x.to(wide)
    rstd = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    # What .to() gives back is the caller's tensor when there was nothing to convert.
    h = h * rstd if x.dtype == wide else h.mul_(rstd)
    if weight is not None:
        h.mul_(_scale(weight, wide, offset))
    if gate is not None:
        h.mul_(F.silu(gate.to(wide)))
    return h.to(x.dtype), rstd


class _FewPasses(torch.autograd.Function):
    """``y = r x s [silu(g)]`` with ``r = rsqrt(mean(x^2) + eps)`` and ``s = offset + w``.

    For the gradient ``d`` of ``r x s``: ``dx = r (s d - x r^2 (x . s d) / H)`` and ``dw = sum(r x d)`` over the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, gate: Any, eps: float, offset: float) -> torch.Tensor:
        y, rstd = _forward(x, weight, gate, eps, offset)
        ctx.save_for_backward(x, weight, gate, rstd)
        ctx.eps, ctx.offset = eps, offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate, rstd = saved_tensors(ctx, "rms_norm by torch")
        if wants_formula():
            return *_differentiable_backward(ctx, x, weight, gate, dy), None, None
        return *_backward(ctx.needs_input_grad, x, weight, gate, rstd, dy, ctx.offset), None, None


def _backward(
    needed: tuple[bool, ...], x: Any, weight: Any, gate: Any, rstd: torch.Tensor, dy: torch.Tensor, offset: float
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight and gate."""
    wide, width = rstd.dtype, x.shape[-1]
    rows, d, r = (t.to(wide).reshape(-1, t.shape[-1]) for t in (x, dy, rstd))
    scale = None if weight is None else _scale(weight, wide, offset)
    dweight = dgate = None
    if gate is not None:
        g = gate.to(wide).reshape(-1, width)
        normed = rows * r
        if scale is not None:
            normed.mul_(scale)
        dgate = torch.ops.aten.silu_backward(normed.mul_(d), g).to(gate.dtype).view(gate.shape)
        d = F.silu(g).mul_(d)
    product = (rows * d).mul_(r)
    slope = dx = None
    if needed[0]:
        dot = product.sum(-1, keepdim=True) if scale is None else torch.mv(product, scale).unsqueeze(-1)
        slope = dot.mul_(r).mul_(-1 / width)
    if weight is not None and needed[1]:
        # Not a matrix-vector product, which would add up all rows one after the other: sum() adds pairwise.
        dweight = product.sum(0).to(weight.dtype)
    if slope is not None:
        dx = product.copy_(d) if scale is None else torch.mul(d, scale, out=product)
        dx = dx.addcmul_(rows, slope).mul_(r).to(x.dtype).view(x.shape)
    return dx, dweight, dgate


def _differentiable_backward(ctx: Any, x: Any, weight: Any, gate: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """The same gradients for a second derivative: those of the reference, with a graph of their own."""
    options = {"compute_dtype": _wide(x)}

    def formula(x: Any, weight: Any, gate: Any) -> torch.Tensor:
        if gate is None:
            return rms_norm(x, weight, ctx.eps, offset=ctx.offset, cast="after", **options)
        return gated_rms_norm(x, gate, weight, ctx.eps, **options)

    return gradients_by_formula(formula, (x, weight, gate), ctx.needs_input_grad[:3], dy)


def refuse_few_passes(x: torch.Tensor) -> str | None:
    """An autograd.Function has no rules for ``torch.func``."""
    return transformed()


# --- the backend ------------------------------------------------------------------------------------------------------


class Formulation(NamedTuple):
    """A way to compute the norm, and why it can't serve a call with an input."""

    norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, float], torch.Tensor]
    refuse: Callable[[torch.Tensor], str | None]


FORMULATIONS = {"cpu": Formulation(few_passes, refuse_few_passes), "accelerator": Formulation(fused, refuse_fused)}


def formulation_for(x: torch.Tensor) -> Formulation:
    """The faster one where the call runs."""
    return FORMULATIONS["cpu" if x.device.type == "cpu" else "accelerator"]


def accepts(site: Site) -> Reason | None:
    """Every variant is served; the question is only whether it is faster."""
    return not_faster("rms_norm", site)


def accepts_gated(site: Site) -> Reason | None:
    return not_faster("gated_rms_norm", site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of one variant."""
    return norm_layer("TorchRMSNorm", site.variant, _norm, _reason("rms_norm"))


def load_gated(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of the gated norm."""
    return gated_norm_layer("TorchGatedRMSNorm", site.variant, _norm, _reason("gated_rms_norm"))


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float, cast: str
) -> torch.Tensor:
    return formulation_for(x).norm(x, weight, gate, eps, offset)


def _reason(op: str) -> CallReason:
    slower = slower_for(op, "torch")

    def reason(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None) -> str | None:
        return _unfit(x, weight, gate) or formulation_for(x).refuse(x) or slower(x)

    return reason


def _unfit(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None) -> str | None:
    """F.rms_norm is one kernel for one dtype only, and some originals promote, as some spread narrower inputs."""
    if gate is not None and gate.shape != x.shape:
        return f"the gate's shape is {tuple(gate.shape)}, the input's {tuple(x.shape)}"
    if x.is_nested:
        return "a nested tensor"
    if x.dim() == 0:
        return "a tensor without dimensions"
    if weight is None:
        return None
    if weight.shape != x.shape[-1:]:
        return f"the weight's shape is {tuple(weight.shape)}, the input's {tuple(x.shape)}"
    if weight.dtype == x.dtype:
        return None
    return f"the weight is {dtype_name(weight.dtype)}, the input {dtype_name(x.dtype)}"
