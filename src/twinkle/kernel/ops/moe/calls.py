"""What the backends of ``moe_experts`` have in common: which calls they take, and the frame of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, Stacks, moe_experts
from twinkle.kernel.ops.moe.routing import Route

SMOOTH = ("silu", "gelu", "gelu_tanh")
"""Activations whose gradient has a closed form here."""

Results = Callable[..., tuple[torch.Tensor, torch.Tensor | None, Route]]
"""``(x, index, weights, stacks, variant, keep)`` to the output, both projections where they are kept, and the route."""

Gradients = Callable[..., list[torch.Tensor | None]]
"""``(x, index, weights, stacks, variant, projected, route, grad, needed)`` to those of x, weights and four stacks."""


def differentiable(results: Results, gradients: Gradients) -> Callable[..., torch.Tensor]:
    """A function ``(x, weights, *stacks, index, variant)`` with gradients, which can be differentiated again."""

    class Experts(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: torch.Tensor,
            weights: torch.Tensor,
            gate_up: torch.Tensor,
            down: torch.Tensor,
            gate_up_bias: torch.Tensor | None,
            down_bias: torch.Tensor | None,
            index: torch.Tensor,
            variant: MoeExpertsVariant,
        ) -> torch.Tensor:
            stacks = gate_up, down, gate_up_bias, down_bias
            out, projected, to = results(x, index, weights, stacks, variant, any(ctx.needs_input_grad))
            ctx.variant = variant
            ctx.save_for_backward(x, weights, *stacks, index, projected, *to)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
            x, weights, gate_up, down, gate_up_bias, down_bias, index, projected, *route = saved_tensors(
                ctx, "moe_experts"
            )
            stacks = gate_up, down, gate_up_bias, down_bias
            needed = ctx.needs_input_grad[:6]
            if wants_formula(grad):
                formula = functools.partial(_by_formula, index=index, variant=ctx.variant)
                return (*gradients_by_formula(formula, (x, weights, *stacks), needed, grad), None, None)
            to = Route(*route)
            return (*gradients(x, index, weights, stacks, ctx.variant, projected, to, grad, needed), None, None)

    return Experts.apply  # type: ignore[no-any-return]


def _by_formula(
    x: torch.Tensor, weights: torch.Tensor, *stacks: Any, index: torch.Tensor, variant: MoeExpertsVariant
) -> torch.Tensor:
    return moe_experts(x, index, weights, stacks, variant)


def call_reason(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks) -> str | None:
    """Why no backend can serve a call."""
    if x.dim() != 2 or index.dim() != 2 or weights.shape != index.shape:
        return "tokens of [tokens, hidden size] and choices of [tokens, chosen] only"
    if index.numel() >= 2**31:
        return "more choices than 32 bits count"
    if index.device != x.device:
        return "the tensors are on different devices"
    if any(stack is not None and stack.dtype != x.dtype for stack in stacks):
        return "tokens and weights have different dtypes"
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype:
        return "autocast would make the original multiply in another dtype"
    return None
