"""The ``triton`` backend of ``qk_norm_rotary``: one launch forward, one backward, for queries and keys together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, quick_apply, saved_tensors, wants_formula
from twinkle.kernel.ops.fused_norms import qk_launch
from twinkle.kernel.ops.fused_norms.qk_launch import Kind
from twinkle.kernel.ops.fused_norms.qk_reference import Rotated, original
from twinkle.kernel.ops.rotary.triton_layout import heads_reason, table_reason
from twinkle.kernel.ops.triton_support import call_reason, library_op
from twinkle.memory import Memory
from twinkle.triton_programs import Program, Traced

if TYPE_CHECKING:
    pass

WIDEST = 512
"""The largest head."""


# --- eagerly ----------------------------------------------------------------------------------------------------------


def _result_dtype(q: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, cast: str) -> torch.dtype:
    if q.dtype == weight.dtype == cos.dtype:
        return q.dtype
    normed = torch.promote_types(q.dtype, weight.dtype) if cast == "before" else q.dtype
    return torch.promote_types(normed, cos.dtype)


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


def _result_place(x: torch.Tensor, heads_at: int) -> Place:
    """``[B, heads, S, D]``, in the memory layout of the norm's input where that is dense."""
    like = torch.empty_like(x, device="meta")
    like = like.transpose(1, 2) if heads_at == 2 else like
    return tuple(like.shape), like.stride()


class _Layout:
    """What all calls of one layout have in common, found out once.

    Attributes:
        kind: what they compute.
        dtype: of the results.
        places: of the results.
        forward: see :func:`qk_launch.forward`.
        backwards: the same for the backward, by the strides and dtypes of what it reads, in which hooks on saved
            tensors may have had their say, and whether the weights' gradients are wanted.
    """

    __slots__ = ("backwards", "dtype", "forward", "kind", "places")

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Kind
    ) -> None:
        self.kind = kind
        self.dtype = _result_dtype(q, weight, cos, kind.cast)
        self.places = _result_place(q, kind.heads_at), _result_place(k, kind.heads_at)
        results = tuple(torch.empty_strided(*place, device="meta") for place in self.places)
        self.forward = qk_launch.forward(Program, q, k, results, cos, sin, kind)  # type: ignore[arg-type]
        self.backwards: dict[tuple[Any, ...], Callable[..., None]] = {}


_layouts: Memory[_Layout] = Memory()


def _eager_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kind: Kind,
) -> tuple[Rotated, _Layout]:
    key = (
        q.shape, q.stride(), k.shape, k.stride(), q.dtype, q_weight.dtype, q.device,
        cos.shape, cos.stride(), sin.stride(), cos.dtype, kind,
    )  # fmt: skip
    layout = _layouts.get(key) or _layouts.add(key, _Layout(q, k, q_weight, cos, sin, kind))
    (q_shape, q_strides), (k_shape, k_strides) = layout.places
    results = (
        torch.empty_strided(q_shape, q_strides, dtype=layout.dtype, device=q.device),
        torch.empty_strided(k_shape, k_strides, dtype=layout.dtype, device=q.device),
    )
    layout.forward(q, k, *results, q_weight, k_weight, cos, sin)
    return results, layout


class _NormRotary(torch.autograd.Function):
    """Two launches, and nothing around them that could be done once."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, kind: Kind) -> Rotated:
        results, ctx.layout = _eager_forward(q, k, q_weight, k_weight, cos, sin, kind)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        return results

    @staticmethod
    def backward(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = saved_tensors(ctx, "qk_norm_rotary by triton")
        layout: _Layout = ctx.layout
        needed = ctx.needs_input_grad[:4]
        if wants_formula(q_grad, k_grad):
            formula: Any = functools.partial(original, cos=cos, sin=sin, **layout.kind._asdict())
            inputs = q, k, q_weight, k_weight
            return (*gradients_by_formula(formula, inputs, needed, q_grad, k_grad), None, None, None)
        needs_dw = needed[2] or needed[3]
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        dqw, dkw = (torch.empty_like(q_weight), torch.empty_like(k_weight)) if needs_dw else (None, None)
        key = (
            q_grad.stride(), k_grad.stride(), q.stride(), k.stride(), cos.stride(), sin.stride(),
            q.dtype, k.dtype, q_weight.dtype, k_weight.dtype, cos.dtype, sin.dtype, needs_dw,
        )  # fmt: skip
        backward = layout.backwards.get(key)
        if backward is None:
            grads = q_grad, k_grad
            backward = qk_launch.backward(Program, grads, q, k, dq, dk, cos, sin, layout.kind, needs_dw)
            layout.backwards[key] = backward
        backward(q_grad, k_grad, q, k, dq, dk, q_weight, k_weight, cos, sin, dqw, dkw)
        return dq, dk, dqw, dkw, None, None, None


_apply = quick_apply(_NormRotary)


# --- under a compiler -------------------------------------------------------------------------------------------------


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, q_eps: float, k_eps: float, offset: float, cast: str, heads_at: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """In the norms' layout; what comes out of the operator is transposed outside of it."""
    dtype = _result_dtype(q, q_weight, cos, cast)
    return tuple([torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k)])  # type: ignore[return-value]


def _heads_first(results: Any, heads_at: int) -> Any:
    return tuple([x.transpose(1, 2) for x in results]) if heads_at == 2 else results


@library_op("twinkle::qk_norm_rotary", _fake_forward)
def _traced_forward(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, q_eps: float, k_eps: float, offset: float, cast: str, heads_at: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    kind = Kind(q_eps, k_eps, offset, cast, heads_at)
    results = _fake_forward(q, k, q_weight, k_weight, cos, sin, *kind)
    program = qk_launch.forward(Traced, q, k, _heads_first(results, heads_at), cos, sin, kind)
    program(q, k, *results, q_weight, k_weight, cos, sin)
    return results


def _fake_backward(
    q_grad: torch.Tensor, k_grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_eps: float, k_eps: float, offset: float,
    heads_at: int, needs_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """An operator returns as many tensors whatever is wanted: an empty one for what isn't."""
    plain = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    weights = [torch.empty_like(x) if needs_dw else x.new_empty(0) for x in (q_weight, k_weight)]
    return (*plain, *weights)  # type: ignore[return-value]


@library_op("twinkle::qk_norm_rotary_backward", _fake_backward)
def _traced_backward(
    q_grad: torch.Tensor, k_grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_eps: float, k_eps: float, offset: float,
    heads_at: int, needs_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients come in the norms' layout too."""
    inputs = q, k, q_weight, k_weight, cos, sin
    dq, dk, dqw, dkw = _fake_backward(q_grad, k_grad, *inputs, q_eps, k_eps, offset, heads_at, needs_dw)
    kind = Kind(q_eps, k_eps, offset, "before", heads_at)
    grads = _heads_first((q_grad, k_grad), heads_at)
    program = qk_launch.backward(Traced, grads, q, k, dq, dk, cos, sin, kind, needs_dw)
    weights = (dqw, dkw) if needs_dw else (None, None)
    program(q_grad, k_grad, q, k, dq, dk, q_weight, k_weight, cos, sin, *weights)
    return dq, dk, dqw, dkw


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.numbers = *inputs[6:9], inputs[10]


def _differentiate(ctx: Any, q_grad: torch.Tensor, k_grad: torch.Tensor) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[2:4]
    dq, dk, *weights = _traced_backward(q_grad, k_grad, *ctx.saved_tensors, *ctx.numbers, any(needed))
    return dq, dk, *(dw if wanted else None for dw, wanted in zip(weights, needed, strict=True)), *[None] * 7


_traced_forward.register_autograd(_differentiate, setup_context=_save)


# --- the backend ------------------------------------------------------------------------------------------------------


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_eps: float,
    k_eps: float,
    offset: float,
    cast: str,
    heads_at: int,
) -> Rotated:
    """See :func:`twinkle.kernel.ops.fused_norms.qk_reference.original`; any strides, of a call that it accepts."""
    kind = Kind(q_eps, k_eps, offset, cast, heads_at)
    if is_compiling():
        results: Rotated = _traced_forward(q, k, q_weight, k_weight, cos, sin, *kind)
        return _heads_first(results, heads_at)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        return _apply(q, k, q_weight, k_weight, cos, sin, kind)  # type: ignore[no-any-return]
    return _eager_forward(q, k, q_weight, k_weight, cos, sin, kind)[0]


def _shape_reason(
    q: torch.Size, k: torch.Size, q_weight: torch.Size, k_weight: torch.Size, cos: torch.Size, heads_at: int
) -> str | None:
    """Why the kernel can't take tensors of these shapes."""
    if len(q) != 4 or len(k) != 4 or len(cos) != 3:
        return "queries and keys of four dimensions, and tables of three, only"
    reason = heads_reason(q, k, heads_at)
    if reason is not None:
        return reason
    if q[-1] > WIDEST:
        return f"heads of more than {WIDEST} channels"
    if tuple(q_weight) != (q[-1],) or tuple(k_weight) != (q[-1],):
        return "a norm's weight isn't as long as a head"
    return table_reason(q, heads_at, cos, cos[-1])


_known_shape_reason = functools.lru_cache(maxsize=1024)(_shape_reason)


def _accepts_call(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads_at: int,
    **options: Any,
) -> str | None:
    reason = call_reason(q, k, q_weight, k_weight, cos, sin)
    if reason is not None:
        return reason
    if q.dtype != k.dtype or q_weight.dtype != k_weight.dtype or cos.dtype != sin.dtype:
        return "query and key, their weights, or cos and sin, differ in dtype"
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin needs a gradient"
    if cos.shape != sin.shape:
        return "cos and sin differ in shape"
    if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
        return "a norm's weight is strided"
    # While a compiler traces, sizes may be symbols, which can't be a cache's key.
    ask = _shape_reason if is_compiling() else _known_shape_reason
    return ask(q.shape, k.shape, q_weight.shape, k_weight.shape, cos.shape, heads_at)


qk_norm_rotary.accepts_call = _accepts_call  # type: ignore[attr-defined]


def load(target: Any) -> Callable[..., Rotated]:
    """The function itself."""
    return qk_norm_rotary
