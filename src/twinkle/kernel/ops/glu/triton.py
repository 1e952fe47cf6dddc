"""The ``triton`` backend of ``swiglu`` and ``geglu``: the activation and the product in one launch each way.

A fused gate-and-up projection is read in place, and its gradient is written in place of the projection's output layout,
so that autograd has nothing to concatenate. A large product isn't kept for the down projection's backward: it is
computed again from gate and up, which the kernel keeps anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import nn
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, quick_apply, saved_tensors, wants_formula
from twinkle.kernel.ops.computed_again import computed_again
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.glu import triton_kernels as kernels
from twinkle.kernel.ops.glu.reference import ACTIVATIONS
from twinkle.kernel.ops.triton_support import call_reason, library_op, rows_of, tuned
from twinkle.kernel.ops.worthwhile import slower_for
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Make, Program, Traced

if TYPE_CHECKING:
    from twinkle.kernel.ops.glu.reference import GluVariant
    from twinkle.kernel.targets import Site


def _layout(*tensors: torch.Tensor) -> tuple[int, int, list[int]] | None:
    """``(rows, width, row strides)`` that reach every element of all tensors; one long row where all are dense."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return 1, first.numel(), [0] * len(tensors)
    strides = []
    for tensor in tensors:
        rows = rows_of(tensor.shape, tensor.stride())
        if rows is None or (rows.middle, rows.inner, rows.column_stride) != (1, 1, 1):
            return None
        strides.append(rows.outer_stride)
    return first.numel() // first.shape[-1], first.shape[-1], strides


def _launched(make: Make, direction: str, tensors: tuple[torch.Tensor, ...], activation: str) -> Callable[..., None]:
    """A function of tensors like these: gate, up and product, or grad, gate, up and the gradients of gate and up."""
    kernel = {"forward": kernels.forward_kernel, "backward": kernels.backward_kernel}[direction]
    layout = _layout(*tensors)
    assert layout is not None
    rows, width, strides = layout
    block, warps = tuned("glu", direction, tensors[0].device, 1)
    blocks = triton.cdiv(width, block)
    constants = {"ACTIVATION": activation, "BLOCK": block}
    return make(kernel, Launch((rows * blocks,), (width, blocks, *strides), constants, warps))


_programs: Memory[Callable[..., None]] = Memory()

Key = tuple[Any, ...]
"""What tells one pair of gate and up, and what is done with them, from another."""


def _key(gate: torch.Tensor, up: torch.Tensor, activation: str) -> Key:
    return gate.shape, gate.stride(), up.stride(), gate.dtype, gate.device, activation


def _eager_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> tuple[torch.Tensor, Key]:
    """The product, contiguous, and the key of gate and up."""
    out = _empty_product(gate)
    key = _key(gate, up, activation)
    program = _programs.get(key)
    if program is None:
        if not _readable(gate, up):
            return _eager_forward(gate.contiguous(), up.contiguous(), activation)[0], key
        program = _programs.add(key, _launched(Program, "forward", (gate, up, out), activation))
    program(gate, up, out)
    return out, key


def _eager_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, results: Any, forward_key: Key) -> None:
    """Writes the gradients of gate and up into ``results``.

    They may lie otherwise than those whose key the forward gave: hooks on saved tensors have had their say.
    """
    dgate, dup = results
    key = forward_key, grad.stride(), gate.stride(), gate.dtype, up.stride(), up.dtype, dgate.stride()
    program = _programs.get(key)
    if program is None:
        activation = forward_key[-1]
        if not _readable(grad, gate, up):
            gate, up = gate.contiguous(), up.contiguous()
            return _eager_backward(grad.contiguous(), gate, up, results, _key(gate, up, activation))
        program = _programs.add(key, _launched(Program, "backward", (grad, gate, up, dgate, dup), activation))
    program(grad, gate, up, dgate, dup)


def _readable(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can read the tensors as they lie."""
    return _layout(*tensors) is not None


def _empty_product(gate: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        product, ctx.key = _eager_forward(gate, up, activation)
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        gate, up = saved_tensors(ctx, "the gated product by triton")
        if wants_formula(grad):
            formula = functools.partial(_by_formula, activation=ctx.key[-1])
            return (*gradients_by_formula(formula, (gate, up), ctx.needs_input_grad[:2], grad), None)
        results = _empty_product(gate), _empty_product(up)
        _eager_backward(grad, gate, up, results, ctx.key)
        return (*results, None)


def _by_formula(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return ACTIVATIONS[activation](gate) * up


class _FusedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product, ctx.key = _eager_forward(gate, up, activation)
        ctx.save_for_backward(gate_up)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (gate_up,) = saved_tensors(ctx, "the gated product by triton")
        if wants_formula(grad):
            formula = functools.partial(_by_formula, activation=ctx.key[-1])
            return (*gradients_by_formula(lambda t: formula(*t.chunk(2, dim=-1)), (gate_up,), (True,), grad), None)
        result = _empty_product(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        _eager_backward(grad, gate, up, result.chunk(2, dim=-1), ctx.key)
        return result, None


_apply, _fused_apply = quick_apply(_Glu), quick_apply(_FusedGlu)


@library_op("twinkle::glu", lambda gate, up, activation: _empty_product(gate))
def _traced_forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up, out = gate.contiguous(), up.contiguous(), _empty_product(gate)
    _launched(Traced, "forward", (gate, up, out), activation)(gate, up, out)
    return out


@library_op("twinkle::glu_backward", lambda grad, gate, up, activation: (_empty_product(gate), _empty_product(up)))
def _traced_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _empty_product(gate), _empty_product(up)
    tensors = (grad.contiguous(), gate.contiguous(), up.contiguous(), *results)
    _launched(Traced, "backward", tensors, activation)(*tensors)
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.activation = inputs[2]


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return (*_traced_backward(grad, *ctx.saved_tensors, ctx.activation), None)


_traced_forward.register_autograd(_differentiate, setup_context=_save)


def _product(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if is_compiling():
        return _traced_forward(gate, up, activation)
    if torch.is_grad_enabled():
        return _apply(gate, up, activation)  # type: ignore[no-any-return]
    return _eager_forward(gate, up, activation)[0]


def _fused_product(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if not is_compiling() and torch.is_grad_enabled():
        return _fused_apply(gate_up, activation)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return _product(gate, up, activation)


def _reason(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    """Why a pair is outside the kernels' domain."""
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return "gate and up differ in shape or dtype"
    return call_reason(gate, up)


def _fused_reason(gate_up: torch.Tensor) -> str | None:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        return "the projection doesn't hold gate and up in equal parts"
    return call_reason(gate_up)


def glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) * up``, differentiable in both.

    Args:
        gate, up: ``[..., I]``, same shape, dtype (fp32, bf16 or fp16) and device.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``; computed in fp32 and rounded to the dtype before the
            product, as the original does.

    Returns:
        ``[..., I]`` contiguous.

    Raises:
        ValueError: the kernels can't take the tensors.
    """
    reason = _reason(gate, up)
    if reason is not None:
        raise ValueError(f"glu: {reason}")
    return _product(gate, up, activation)


def fused_glu(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(gate) * up`` of a projection ``[..., 2 I]`` that holds gate, then up; otherwise as :func:`glu`."""
    reason = _fused_reason(gate_up)
    if reason is not None:
        raise ValueError(f"fused_glu: {reason}")
    return _fused_product(gate_up, activation)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class for one variant. The projections run as they are; should they return what the kernel can't take
    (another dtype for gate than for up, say), the activation and product run eagerly."""
    variant: GluVariant = site.variant
    activation, down = variant.activation, variant.projections[-1]
    eager = ACTIVATIONS[activation]
    slower = slower_for("swiglu" if activation == "silu" else "geglu", "triton")

    def again(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _eager_forward(gate, up, activation)[0]

    if len(variant.projections) == 2:
        fused = variant.projections[0]

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate_up = getattr(self, fused)(x)
            gate, up = gate_up.chunk(2, dim=-1)
            if _fused_reason(gate_up) is not None:
                return getattr(self, down)(eager(gate) * up)
            product = _fused_product(gate_up, activation)
            with computed_again(product, again, gate, up):
                return getattr(self, down)(product)

    else:
        gate_name, up_name, _ = variant.projections

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate, up = getattr(self, gate_name)(x), getattr(self, up_name)(x)
            if _reason(gate, up) is not None:
                return getattr(self, down)(eager(gate) * up)
            product = _product(gate, up, activation)
            with computed_again(product, again, gate, up):
                return getattr(self, down)(product)

    def accepts_call(self: Any, x: torch.Tensor) -> str | None:
        return call_reason(x) or slower(x)

    return layer("TritonGLU", forward, accepts_call)
