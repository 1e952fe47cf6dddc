"""The ``triton`` backend of ``rms_norm`` and ``gated_rms_norm``: one launch forward, one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, quick_apply, saved_tensors, wants_formula
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.rms_norm.gated_reference import gated_rms_norm
from twinkle.kernel.ops.rms_norm.layers import gated_norm_layer, norm_layer
from twinkle.kernel.ops.rms_norm.reference import rms_norm as reference_rms_norm
from twinkle.kernel.ops.rms_norm.triton_launch import WIDEST, Kind
from twinkle.kernel.ops.triton_support import call_reason, has_rows, library_op, rows_reason
from twinkle.memory import Memory
from twinkle.triton_programs import Program, Traced

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


class _Layout:
    """What all norms of inputs of one layout have in common, found out once.

    Attributes:
        kind: what they compute.
        new_x, new_gate: make a tensor like them: ``torch.empty_like``, or what they need in its place.
        new_y: the same for the result, of ``x``.
        forward: see :func:`triton_launch.forward`.
        backwards: the same for the backward, by :func:`_backward_key`.
    """

    __slots__ = ("backwards", "forward", "kind", "new_gate", "new_x", "new_y")

    def __init__(self, x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, kind: Kind) -> None:
        self.kind = _, _, cast = kind
        self.new_x = _maker(x)
        self.new_gate = None if gate is None else _maker(gate)
        dtype = _result_dtype(x, weight, gate, cast)
        self.new_y = self.new_x if dtype == x.dtype else functools.partial(self.new_x, dtype=dtype)
        self.forward = triton_launch.forward(Program, x, weight, gate, self.new_y(x, device="meta"), kind)
        self.backwards: dict[tuple[Any, ...], Callable[..., None]] = {}


_layouts: Memory[_Layout] = Memory()


def _eager_forward(x: torch.Tensor, weight: Any, gate: Any, kind: Kind) -> tuple[torch.Tensor, _Layout]:
    """The result, and what is known of the layout."""
    key = triton_launch.layout_of(x, weight, gate, kind)
    layout = _layouts.get(key) or _layouts.add(key, _Layout(x, weight, gate, kind))
    y = layout.new_y(x)
    layout.forward(x, weight, gate, y)
    return y, layout


class _RMSNorm(torch.autograd.Function):
    """The eager way: two launches, and nothing around them that could be done once."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, gate: Any, kind: Kind) -> torch.Tensor:
        y, ctx.layout = _eager_forward(x, weight, gate, kind)
        ctx.save_for_backward(x, weight, gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, gate = saved_tensors(ctx, "rms_norm by triton")
        if wants_formula(dy):
            formula = functools.partial(_by_formula, kind=ctx.layout.kind)
            return (*gradients_by_formula(formula, (x, weight, gate), ctx.needs_input_grad[:3], dy), None)
        layout: _Layout = ctx.layout
        needs_dw = ctx.needs_input_grad[1]
        key = _backward_key(dy, x, weight, gate, needs_dw)
        backward = layout.backwards.get(key)
        if backward is None:
            dy, x, gate = (one if one is None or has_rows(one) else one.contiguous() for one in (dy, x, gate))
            key = _backward_key(dy, x, weight, gate, needs_dw)
            backward = layout.backwards.get(key)
        dx = layout.new_x(x)
        dw = torch.empty_like(weight) if needs_dw else None
        dgate = None if layout.new_gate is None else layout.new_gate(gate)
        if backward is None:
            eps, offset, _ = layout.kind
            backward = triton_launch.backward(Program, dy, x, weight, gate, (dx, dw, dgate), eps, offset)
            layout.backwards[key] = backward
        backward(dy, x, weight, gate, dx, dw, dgate)
        return dx, dw, dgate, None


_apply = quick_apply(_RMSNorm)


def _backward_key(dy: torch.Tensor, x: torch.Tensor, weight: Any, gate: Any, needs_dw: bool) -> tuple[Any, ...]:
    """What tells the backwards of one layout apart. In all but ``dy`` hooks on saved tensors may have had their say."""
    return (
        dy.stride(), x.stride(), x.dtype, None if weight is None else weight.dtype,
        None if gate is None else (gate.stride(), gate.dtype), needs_dw,
    )  # fmt: skip


def _by_formula(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, kind: Kind) -> torch.Tensor:
    eps, offset, cast = kind
    if gate is not None and weight is not None:
        return gated_rms_norm(x, gate, weight, eps)
    return reference_rms_norm(x, weight, eps, offset=offset, cast=cast)  # type: ignore[arg-type]


def _result_dtype(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, cast: str) -> torch.dtype:
    if cast != "before" or weight is None or gate is not None or weight.dtype == x.dtype:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _maker(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Makes tensors in the layout of one, where that is dense.

    What torch makes of overlapping strides may have no rows.
    """
    return torch.empty_like if has_rows(torch.empty_like(tensor, device="meta")) else _dense_like


def _dense_like(tensor: torch.Tensor, **changes: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, **changes)


def _fake_forward(x: torch.Tensor, weight: Any, gate: Any, eps: float, offset: float, cast: str) -> torch.Tensor:
    return _dense_like(x, dtype=_result_dtype(x, weight, gate, cast))


def _fake_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, gate: Any, eps: float, offset: float, needs_dw: bool
) -> Any:
    """An operator returns as many tensors whatever is wanted: an empty one for what isn't."""
    wanted = (x, weight if needs_dw else None, gate)
    return tuple([x.new_empty(0) if tensor is None else _dense_like(tensor) for tensor in wanted])


@library_op("twinkle::rms_norm", _fake_forward)
def _traced_forward(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float, cast: str
) -> torch.Tensor:
    y = _dense_like(x, dtype=_result_dtype(x, weight, gate, cast))
    gate = None if gate is None else gate.contiguous()
    x = x.contiguous()
    triton_launch.forward(Traced, x, weight, gate, y, (eps, offset, cast))(x, weight, gate, y)
    return y


@library_op("twinkle::rms_norm_backward", _fake_backward)
def _traced_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    offset: float,
    needs_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dw, dgate = _fake_backward(dy, x, weight, gate, eps, offset, needs_dw)
    results = dx, dw if needs_dw else None, None if gate is None else dgate
    gate = None if gate is None else gate.contiguous()
    dy, x = dy.contiguous(), x.contiguous()
    triton_launch.backward(Traced, dy, x, weight, gate, results, eps, offset)(dy, x, weight, gate, *results)
    return dx, dw, dgate


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, gate, eps, offset, _ = inputs
    ctx.save_for_backward(x, weight, gate)
    ctx.numbers = eps, offset


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, gate = ctx.saved_tensors
    needs_dw = ctx.needs_input_grad[1]
    dx, dw, dgate = _traced_backward(dy, x, weight, gate, *ctx.numbers, needs_dw)
    return dx, dw if needs_dw else None, None if gate is None else dgate, None, None, None


_traced_forward.register_autograd(_differentiate, setup_context=_save)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float, offset: float, cast: str
) -> torch.Tensor:
    if is_compiling():
        return _traced_forward(x, weight, gate, eps, offset, cast)
    kind = eps, offset, cast
    if torch.is_grad_enabled():
        return _apply(x, weight, gate, kind)
    return _eager_forward(x, weight, gate, kind)[0]


def _reason(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None) -> str | None:
    """Why a call is outside the kernels' domain."""
    reason = call_reason(x, weight, gate) or rows_reason(x, gate)
    if reason is not None:
        return reason
    width = x.shape[-1]
    if weight is not None and (weight.numel() != width or not weight.is_contiguous()):
        return "the weight is strided, or not as long as the rows"
    if gate is not None:
        if weight is None or gate.shape != x.shape:
            return "a gate of another shape than the input's, or without a weight"
        if width > WIDEST["backward"]:
            return "rows too wide for the gated kernel"
    return None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    offset: float,
    cast: str,
) -> torch.Tensor:
    """RMSNorm over the last dimension, optionally gated, differentiable in ``x``, ``weight`` and ``gate``.

    Args:
        x: ``[..., H]``; fp32, bf16 or fp16, any strides that :func:`rows_of` describes.
        weight: ``[H]`` contiguous, of any of those dtypes, or None.
        gate: ``x``'s shape, or None.
        eps, offset, cast: see :mod:`twinkle.kernel.ops.rms_norm.reference`; 0 and ``"before"`` with a gate.

    Returns:
        ``[..., H]``, in ``x``'s layout where that is dense; the dtype as the reference gives it.

    Raises:
        ValueError: the kernels can't take the tensors.
    """
    reason = _reason(x, weight, gate)
    if reason is not None:
        raise ValueError(f"rms_norm: {reason}")
    return _norm(x, weight, gate, eps, offset, cast)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of one variant."""
    return norm_layer("TritonRMSNorm", site.variant, _norm, _reason)


def load_gated(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of the gated norm."""
    return gated_norm_layer("TritonGatedRMSNorm", site.variant, _norm, _reason)
