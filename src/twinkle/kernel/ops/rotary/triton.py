"""The ``triton`` backend of ``rotary``: query and key in one launch, every dialect, any strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.kernel.ops.rotary import triton_kernels as kernels
from twinkle.kernel.ops.rotary.reference import DIALECTS, Dialect, RotaryVariant, function_of
from twinkle.kernel.ops.rotary.reference import rotate as reference_rotate
from twinkle.kernel.ops.rotary.triton_layout import dealt, heads_reason, places, strides_of, table_reason
from twinkle.kernel.ops.triton_support import call_reason, library_op, tuned
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Make, Program, Traced

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


class _Channels(NamedTuple):
    """Where a dialect's pairs lie, in units of channels; see the kernel for the names."""

    first_in: int
    step_in: int
    first_out: int
    step_out: int
    table_step: int
    table_b: int
    start: int
    pairs: int


@functools.lru_cache(maxsize=256)
def _channels(dialect: Dialect, table: int, head_dim: int) -> _Channels:
    pairs = table if dialect.table == "half_width" else table // 2
    start = head_dim - 2 * pairs if dialect.part == "trailing" else 0
    halves, interleaved = (pairs, 1), (1, 2)
    layout_in = halves if dialect.pairing == "half" else interleaved
    layout_out = halves if dialect.output == "halves" else layout_in
    if dialect.table != "full":
        table_step, table_b = 1, 0
    else:
        table_b, table_step = layout_in
    return _Channels(*layout_in, *layout_out, table_step, table_b, start, pairs)


def _launched(
    make: Make,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    number: int,
    heads_at: int,
    backward: bool,
) -> Callable[..., None]:
    """A function ``(q, k, q_out, k_out, cos, sin)`` of tensors like these; a single tensor is given twice."""
    q, k = inputs[0], inputs[-1]
    dialect = DIALECTS[number]
    # These are compiled in: a compiler that traces must settle them, should they be symbols.
    head_dim, table_width, *heads = map(int, (q.shape[-1], cos.shape[-1], q.shape[heads_at], k.shape[heads_at]))
    at = _channels(dialect, table_width, head_dim)
    has_batch = q.dim() == 4
    length = q.shape[3 - heads_at] if has_batch else q.shape[0]
    batch = q.shape[0] if has_batch else 1
    pairs = triton.next_power_of_2(at.pairs)
    rest = triton.next_power_of_2(head_dim - 2 * at.pairs) if head_dim > 2 * at.pairs else 0
    first_in, step_in, first_out, step_out = at[:4]
    if backward and dialect.output == "halves":  # the gradient comes in halves and goes back to pairs
        first_in, step_in, first_out, step_out = first_out, step_out, first_in, step_in
    elements, warps = tuned("rotary", "backward" if backward else "forward", q.device, 1)
    heads_each, blocks = dealt(heads, max(1, elements // max(pairs, rest)))
    strides = [strides_of(tensor, heads_at) for tensor in (q, k, outputs[0], outputs[-1])]
    everything, is_far = places(strides, (cos, sin), max(heads), head_dim)
    constants = {
        "FIRST_IN": first_in, "STEP_IN": step_in, "FIRST_OUT": first_out, "STEP_OUT": step_out,
        "TABLE_STEP": at.table_step, "TABLE_B": at.table_b, "BACKWARD": backward, "HAS_K": len(inputs) == 2,
        "Q_HEADS": heads_each[0], "K_HEADS": heads_each[1], "PAIRS": pairs, "REST": rest,
        "FAR": is_far,
    }  # fmt: skip
    scalars = (length, *heads, blocks, head_dim, at.pairs, at.start, *everything)
    return make(kernels.rotary_kernel, Launch((batch * length * blocks,), scalars, constants, warps))


def _result_dtype(x: torch.Tensor, table: torch.Tensor, dialect: Dialect) -> torch.dtype:
    if dialect.restores or x.dtype == table.dtype:
        return x.dtype
    return torch.promote_types(x.dtype, table.dtype)


_programs: Memory[Callable[..., None]] = Memory()


def _eager_forward(
    inputs: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """The results, and the key to what is known of the layout."""
    q, k = inputs[0], inputs[-1]
    dtype = _result_dtype(q, cos, DIALECTS[dialect])
    outputs = tuple([torch.empty_like(tensor, dtype=dtype) for tensor in inputs])
    key: Any = (q.shape, q.stride(), q.dtype, cos.shape, cos.stride(), cos.dtype, sin.stride(), q.device)
    key = (key, dialect, heads_at, None if len(inputs) == 1 else (k.shape, k.stride()))
    program = _programs.get(key)
    if program is None:
        program = _launched(Program, inputs, outputs, cos, sin, dialect, heads_at, backward=False)
        _programs.add(key, program)
    program(q, k, outputs[0], outputs[-1], cos, sin)
    return outputs, key


class _Rotary(torch.autograd.Function):
    """One or two tensors; the gradients are written in the layout of the tensors that they belong to."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: Any, cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int
    ) -> Any:
        inputs = (q,) if k is None else (q, k)
        outputs, key = _eager_forward(inputs, cos, sin, dialect, heads_at)
        ctx.save_for_backward(cos, sin)
        ctx.layouts = [(tensor.shape, out.stride()) for tensor, out in zip(inputs, outputs, strict=True)]
        ctx.dtype, ctx.dialect, ctx.heads_at, ctx.key = q.dtype, dialect, heads_at, key
        return outputs if k is not None else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = saved_tensors(ctx, "rotary by triton")
        results: Any
        if wants_formula(*grads):
            results = [_turned_back(grad, cos, sin, ctx.dialect, ctx.heads_at, ctx.dtype) for grad in grads]
        else:
            results = [torch.empty_strided(*at, dtype=ctx.dtype, device=cos.device) for at in ctx.layouts]
            # Hooks on saved tensors may have laid out the tables anew.
            key = (ctx.key, *[tensor.stride() for tensor in (*grads, cos, sin)], cos.dtype, sin.dtype, "backward")
            program = _programs.get(key)
            if program is None:
                program = _launched(Program, grads, results, cos, sin, ctx.dialect, ctx.heads_at, backward=True)
                _programs.add(key, program)
            program(grads[0], grads[-1], results[0], results[-1], cos, sin)
        return results[0], results[1] if len(results) == 2 else None, None, None, None, None


def _turned_back(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The backward by the reference. A rotation is linear, so it doesn't matter where its derivative is taken."""
    at = 0 if grad.dim() == 4 and cos.dim() == 2 else heads_at
    cos, sin = cos.unsqueeze(at), sin.unsqueeze(at)
    origin = torch.zeros(grad.shape, dtype=dtype, device=grad.device, requires_grad=True)
    turn = functools.partial(reference_rotate, cos=cos, sin=sin, dialect=DIALECTS[dialect])
    return gradients_by_formula(turn, (origin,), (True,), grad)[0]


def _traced_results(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int, backward: bool
) -> tuple[torch.Tensor, ...]:
    dtypes = [t.dtype if backward else _result_dtype(t, cos, DIALECTS[dialect]) for t in (q, k)]
    return tuple(torch.empty(t.shape, dtype=d, device=t.device) for t, d in zip((q, k), dtypes, strict=True))


@library_op("twinkle::rotary", _traced_results)
def _traced(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A dialect goes in as its number in DIALECTS; a missing key as an empty tensor."""
    results = _traced_results(q, k, cos, sin, dialect, heads_at, backward)
    count = 2 if k.numel() else 1
    inputs, outputs = (q, k)[:count], results[:count]
    program = _launched(Traced, inputs, outputs, cos, sin, dialect, heads_at, backward)
    program(q, inputs[-1], outputs[0], outputs[-1], cos, sin)
    return results  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, cos, sin, ctx.dialect, ctx.heads_at, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)
    ctx.dtypes = (q.dtype, k.dtype)


def _differentiate(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    """The gradient is turned the other way."""
    grads = _traced(dq, dk, *ctx.saved_tensors, ctx.dialect, ctx.heads_at, not ctx.backward)
    return (*(g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None, None, None)


_traced.register_autograd(_differentiate, setup_context=_save)


def _rotate(
    tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, dialect: int, heads_at: int
) -> tuple[torch.Tensor, ...]:
    """Rotates one tensor or two, differentiable in them.

    Args:
        tensors: ``[B, H, S, D]`` (``heads_at=1``), ``[B, S, H, D]`` (2) or ``[S, H, D]`` (1), any strides.
        cos, sin: ``[B or 1, S, table]`` or ``[S, table]``, as the dialect lays them out.
        dialect: the maths, by its number in DIALECTS: what compilers can carry, and quick to look up by.

    Returns:
        tensors of the same shapes, in their layout where it is dense; the dtype as the reference gives it.
    """
    if is_compiling():
        k = tensors[1] if len(tensors) == 2 else tensors[0].new_empty((0,) * tensors[0].dim())
        return _traced(tensors[0], k, cos, sin, dialect, heads_at, False)[: len(tensors)]
    if not torch.is_grad_enabled():
        return _eager_forward(tensors, cos, sin, dialect, heads_at)[0]
    results = _Rotary.apply(tensors[0], tensors[1] if len(tensors) == 2 else None, cos, sin, dialect, heads_at)
    return results if len(tensors) == 2 else (results,)


_HEADS_AT = {(4, 3, 1): 1, (4, 3, 2): 2, (4, 2, 0): 1, (3, 2, 1): 1, (3, 2, -2): 1}
"""(dimensions of the tensors, of the tables, where the latter get the heads' dimension) -> its place in the former."""


def _shape_reason(
    variant: RotaryVariant, shapes: tuple[torch.Size, ...], table: torch.Size, unsqueeze_dim: int
) -> str | None:
    """Why the kernel can't take tensors of these shapes; with ``table``, the shape of cos and sin."""
    first = shapes[0]
    heads_at = _HEADS_AT.get((len(first), len(table), unsqueeze_dim))
    if heads_at is None:
        return "dimensions, or a place for the heads in cos and sin, that the kernel doesn't know"
    width = table[-1] * 2 if variant.dialect.table == "half_width" else table[-1]
    return heads_reason(first, shapes[-1], heads_at) or table_reason(first, heads_at, table, width, variant.partial)


def load(target: Any, site: Site) -> Callable[..., Any]:
    """The function for one variant, with the original's signature."""
    variant: RotaryVariant = site.variant
    dialect = DIALECTS.index(variant.dialect)
    shape_reason = functools.partial(_shape_reason, variant)
    known_shape_reason = functools.lru_cache(maxsize=1024)(shape_reason)

    def kernel(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        return _rotate(tensors, cos, sin, dialect, 2 if unsqueeze_dim == 2 else 1)

    def reason(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        found = call_reason(*tensors, cos, sin)
        if found is None and (cos.requires_grad or sin.requires_grad):
            found = "cos or sin needs a gradient"
        if found is None and (tensors[0].dtype != tensors[-1].dtype or cos.dtype != sin.dtype):
            found = "query and key, or cos and sin, differ in dtype"
        if found is None and cos.shape != sin.shape:
            found = "cos and sin differ in shape"
        if found is None:
            # While a compiler traces, sizes may be symbols, which can't be a cache's key.
            ask = shape_reason if is_compiling() else known_shape_reason
            found = ask(tuple([tensor.shape for tensor in tensors]), cos.shape, unsqueeze_dim)
        return found

    return function_of(variant, kernel, reason, "triton_rotary")
