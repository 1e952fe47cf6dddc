"""The ``triton`` backend of ``add_rms_norm``: one launch forward, one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, quick_apply, saved_tensors, wants_formula
from twinkle.kernel.ops.fused_norms import add_kernels as kernels
from twinkle.kernel.ops.fused_norms.add_reference import SumAndNorm, original
from twinkle.kernel.ops.rms_norm.triton_launch import WIDEST, Kind, tiling_of
from twinkle.kernel.ops.triton_parts import GROUP, counters
from twinkle.kernel.ops.triton_support import call_reason, library_op
from twinkle.memory import Memory
from twinkle.triton_programs import NO_SCRATCH, Launch, Make, Program, Traced

if TYPE_CHECKING:
    pass


# --- launches ---------------------------------------------------------------------------------------------------------


def _forward(make: Make, x: torch.Tensor, kind: Kind) -> Callable[..., None]:
    """A function ``(residual, summand, weight, total, y, rstd)`` of rows like those of ``x``."""
    width = int(x.shape[-1])  # compiled in: a compiler that traces must settle it, should it be a symbol
    count = x.numel() // width
    rows_each, block, warps, programs, _ = tiling_of(x.device, "forward", width, count)
    eps, offset, cast = kind
    constants = {"OFFSET": offset, "CAST": cast, "ROWS": rows_each, "BLOCK": block}
    return make(kernels.forward_kernel, Launch((programs,), (count, width, eps), constants, warps))


def _backward(make: Make, x: torch.Tensor, offset: float, needs_dw: bool) -> Callable[..., None]:
    """A function ``(dtotal, dy, total, weight, rstd, dx, dw)``; ``dw`` is None where it isn't wanted."""
    width = int(x.shape[-1])
    count = x.numel() // width
    rows_each, block, warps, programs, stages = tiling_of(x.device, "backward", width, count)
    constants = {
        "OFFSET": offset, "NEEDS_DW": needs_dw, "ROWS": rows_each, "BLOCK": block, "GROUP": GROUP, "STAGES": stages,
    }  # fmt: skip
    scratch = (counters(programs), programs * width) if needs_dw else None
    numbers = (*(() if scratch else NO_SCRATCH), count, width, triton.cdiv(count, rows_each), programs)
    return make(kernels.backward_kernel, Launch((programs,), numbers, constants, warps, scratch=scratch))


# --- eagerly ----------------------------------------------------------------------------------------------------------


def _dtypes(residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, cast: str) -> tuple[torch.dtype, ...]:
    """Of the sum and of its norm."""
    total = torch.promote_types(residual.dtype, summand.dtype)
    return total, torch.promote_types(total, weight.dtype) if cast == "before" else total


class _Layout:
    """What all calls with tensors of one shape and dtype have in common, found out once.

    Attributes:
        kind: what they compute.
        dtypes: of the sum and of its norm.
        rows: how many.
        forward: see :func:`_forward`.
        backwards: the same for the backward, by the dtypes of what was saved, in which hooks may have had their say,
            and whether the weight's gradient is wanted.
    """

    __slots__ = ("backwards", "dtypes", "forward", "kind", "rows")

    def __init__(self, residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, kind: Kind) -> None:
        self.kind = _, _, cast = kind
        self.dtypes = _dtypes(residual, summand, weight, cast)
        self.rows = residual.numel() // residual.shape[-1]
        self.forward = _forward(Program, residual, kind)
        self.backwards: dict[tuple[Any, ...], Callable[..., None]] = {}


_layouts: Memory[_Layout] = Memory()


def _eager_forward(
    residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Layout]:
    """The sum, its norm, ``rstd``, and what is known of the layout."""
    key = residual.shape, residual.dtype, summand.dtype, weight.dtype, residual.device, kind
    layout = _layouts.get(key) or _layouts.add(key, _Layout(residual, summand, weight, kind))
    total_dtype, y_dtype = layout.dtypes
    total = torch.empty_like(residual, dtype=total_dtype)
    y = torch.empty_like(residual, dtype=y_dtype)
    rstd = residual.new_empty(layout.rows, dtype=torch.float32)
    layout.forward(residual, summand, weight, total, y, rstd)
    return total, y, rstd, layout


class _AddNorm(torch.autograd.Function):
    """Two launches, and nothing around them that could be done once."""

    @staticmethod
    def forward(ctx: Any, residual: Any, summand: Any, weight: Any, kind: Kind) -> SumAndNorm:
        total, y, rstd, ctx.layout = _eager_forward(residual, summand, weight, kind)
        ctx.save_for_backward(total, weight, rstd)
        ctx.dtypes = residual.dtype, summand.dtype
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight, rstd = saved_tensors(ctx, "add_rms_norm by triton")
        layout: _Layout = ctx.layout
        needs_dw = ctx.needs_input_grad[2]
        if wants_formula(dtotal, dy):
            # Of the sum alone, which the total stands for: its gradient is that of either summand.
            formula: Any = functools.partial(_from_total, kind=layout.kind)
            found = gradients_by_formula(formula, (total, weight), (True, needs_dw), dtotal, dy)
            dx, dw = found[0], found[1]
            assert dx is not None
        else:
            dx, dw = torch.empty_like(total), torch.empty_like(weight) if needs_dw else None
            key = total.dtype, weight.dtype, rstd.dtype, needs_dw
            backward = layout.backwards.get(key)
            if backward is None:
                _, offset, _ = layout.kind
                backward = _backward(Program, total, offset, needs_dw)
                layout.backwards[key] = backward
            backward(dtotal.contiguous(), dy.contiguous(), total.contiguous(), weight, rstd, dx, dw)
        return (*[dx if dx.dtype == dtype else dx.to(dtype) for dtype in ctx.dtypes], dw, None)


_apply = quick_apply(_AddNorm)


def _from_total(total: torch.Tensor, weight: torch.Tensor, kind: Kind) -> SumAndNorm:
    eps, offset, cast = kind
    return original(total, torch.zeros_like(total), weight, eps=eps, offset=offset, cast=cast)  # type: ignore[arg-type]


# --- under a compiler -------------------------------------------------------------------------------------------------


def _fake_forward(
    residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = [torch.empty_like(residual, dtype=dtype) for dtype in _dtypes(residual, summand, weight, cast)]
    return *results, residual.new_empty(residual.numel() // residual.shape[-1], dtype=torch.float32)  # type: ignore[return-value]


@library_op("twinkle::add_rms_norm", _fake_forward)
def _traced_forward(
    residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _fake_forward(residual, summand, weight, eps, offset, cast)
    _forward(Traced, residual, (eps, offset, cast))(residual, summand, weight, *results)
    return results


def _fake_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    offset: float, needs_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """An operator returns as many tensors whatever is wanted: an empty one for what isn't."""
    return torch.empty_like(total), torch.empty_like(weight) if needs_dw else weight.new_empty(0)


@library_op("twinkle::add_rms_norm_backward", _fake_backward)
def _traced_backward(
    dtotal: torch.Tensor, dy: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    offset: float, needs_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dx, dw = _fake_backward(dtotal, dy, total, weight, rstd, offset, needs_dw)
    program = _backward(Traced, total, offset, needs_dw)
    program(dtotal.contiguous(), dy.contiguous(), total, weight, rstd, dx, dw if needs_dw else None)
    return dx, dw


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    residual, summand, weight, _, ctx.offset, _ = inputs
    ctx.save_for_backward(output[0], weight, output[2])
    ctx.dtypes = residual.dtype, summand.dtype


def _differentiate(ctx: Any, dtotal: torch.Tensor, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    needs_dw = ctx.needs_input_grad[2]
    dx, dw = _traced_backward(dtotal, dy, *ctx.saved_tensors, ctx.offset, needs_dw)
    return *[dx.to(dtype) for dtype in ctx.dtypes], dw if needs_dw else None, None, None, None


_traced_forward.register_autograd(_differentiate, setup_context=_save)


# --- the backend ------------------------------------------------------------------------------------------------------


def add_rms_norm(
    residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, cast: str
) -> SumAndNorm:
    """See :func:`twinkle.kernel.ops.fused_norms.add_reference.original`, of a call that it accepts."""
    if is_compiling():
        return _traced_forward(residual.contiguous(), summand.contiguous(), weight, eps, offset, cast)[:2]
    kind = eps, offset, cast
    if torch.is_grad_enabled():
        return _apply(residual, summand, weight, kind)  # type: ignore[no-any-return]
    return _eager_forward(residual, summand, weight, kind)[:2]


def _accepts_call(residual: torch.Tensor, summand: torch.Tensor, weight: torch.Tensor, **options: Any) -> str | None:
    reason = call_reason(residual, summand, weight)
    if reason is not None:
        return reason
    if residual.shape != summand.shape:
        return "the summands differ in shape"
    if not is_compiling() and not (residual.is_contiguous() and summand.is_contiguous()):
        return "a summand with gaps, or in another order of dimensions"
    if residual.dim() == 0 or weight.shape != residual.shape[-1:] or not weight.is_contiguous():
        return "the weight is strided, or not as long as the rows"
    if residual.shape[-1] > WIDEST["backward"]:
        return f"rows of more than {WIDEST['backward']} numbers"
    return None


add_rms_norm.accepts_call = _accepts_call  # type: ignore[attr-defined]


def load(target: Any) -> Callable[..., SumAndNorm]:
    """The function itself."""
    return add_rms_norm
