"""The ``triton`` backend of ``moe_block``: the gated shared expert joins the experts in one launch, both ways.

Router and experts have kernels of their own; between them a block computes nothing else. Its children are only called,
so whatever serves them does, and adapters on them stay what they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe.block_reference import nothing_to_fuse
from twinkle.kernel.ops.triton_support import call_reason, device_reason
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Program

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site
    from twinkle.reasons import Reason

COLUMNS = 1024
"""Of a row, as many as a program holds at a time."""


@triton.jit
def join_kernel(routed_ptr, gate_ptr, shared_ptr, out_ptr, width, COLUMNS: tl.constexpr):
    """A row of ``routed + sigmoid(gate) * shared``, in part."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = row * width + column
    share = tl.sigmoid(tl.load(gate_ptr + row).to(tl.float32))
    routed = tl.load(routed_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (routed + share * shared).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_backward_kernel(grad_ptr, gate_ptr, shared_ptr, dgate_ptr, dshared_ptr, width, COLUMNS: tl.constexpr):
    """A row's gradients of the gate and of the shared expert; that of the experts is the row's own."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.sigmoid(tl.load(gate_ptr + row).to(tl.float32))
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * width + column
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += grad * tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dshared_ptr + at, (grad * share).to(dshared_ptr.dtype.element_ty), mask=inside)
    dgate = tl.sum(total, axis=0) * share * (1.0 - share)
    tl.store(dgate_ptr + row, dgate.to(dgate_ptr.dtype.element_ty))


_programs: Memory[tuple[Program, Program]] = Memory()


def _programs_for(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> tuple[Program, Program]:
    """Forward and backward."""
    key = routed.shape, routed.dtype, gate.dtype, shared.dtype, routed.device
    return _programs.get(key) or _programs.add(key, _launched(routed.shape[0], routed.shape[1]))


def _launched(tokens: int, width: int) -> tuple[Program, Program]:
    constants = {"COLUMNS": min(COLUMNS, triton.next_power_of_2(width))}
    parts = triton.cdiv(width, constants["COLUMNS"])
    return (
        Program(join_kernel, Launch((tokens, parts), (width,), constants, 4)),
        Program(join_backward_kernel, Launch((tokens,), (width,), constants, 4)),
    )


class _Join(torch.autograd.Function):
    """``routed [T, H] + sigmoid(gate [T, 1]) * shared [T, H]``, all contiguous and of one dtype."""

    @staticmethod
    def forward(ctx: Any, routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(routed)
        _programs_for(routed, gate, shared)[0](routed, gate, shared, out)
        ctx.save_for_backward(gate, shared)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, shared = saved_tensors(ctx, "moe_block by triton")
        if wants_formula(grad):
            wanted = ctx.needs_input_grad[1:]
            return (grad, *gradients_by_formula(_gated, (gate, shared), wanted, grad))
        grad = grad.contiguous()
        dgate, dshared = torch.empty_like(gate), torch.empty_like(shared)
        _programs_for(grad, gate, shared)[1](grad, gate, shared, dgate, dshared)
        return grad, dgate, dshared


def _gated(gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(gate) * shared


def join(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """``routed [T, H] + sigmoid(gate [T, 1]) * shared [T, H]``, differentiable.

    What the children of a block return may be anything, so what the program can't take goes PyTorch's way.
    """
    plain = routed.shape == shared.shape and gate.shape == (routed.shape[0], 1)
    alike = routed.dtype == gate.dtype == shared.dtype
    if not (plain and alike) or call_reason(routed, gate, shared) is not None:
        return routed + _gated(gate, shared)
    result: torch.Tensor = _Join.apply(routed.contiguous(), gate.contiguous(), shared.contiguous())
    return result


def accepts(site: Site) -> Reason | None:
    """Blocks with a shared expert, on a device that Triton runs on."""
    return nothing_to_fuse(site.variant) or device_reason(site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(tokens)
        routed = self.experts(tokens, index, weights)
        return join(routed, self.shared_expert_gate(tokens), self.shared_expert(tokens)).reshape(hidden_states.shape)

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        if is_compiling():
            return "inside a compiler, which fuses it itself"
        return call_reason(hidden_states)

    return layer("TritonMoeBlock", forward, accepts_call)
