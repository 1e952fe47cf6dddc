"""The ``triton`` backend of ``moe_experts``: rows sorted by expert, the gate and the router's weights fused, both ways.

The matrix products are PyTorch's where they can take what is there, else our own. The router's weights are applied
where the experts' results are summed up. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe import torch_products, triton_products
from twinkle.kernel.ops.moe import triton_launch as launch
from twinkle.kernel.ops.moe.experts_reference import (
    MoeExpertsVariant,
    Stacks,
    moe_experts,
    other_implementation,
    stacks_of,
)
from twinkle.kernel.ops.moe.routing import Route
from twinkle.kernel.ops.moe.triton_routing import route
from twinkle.kernel.ops.triton_support import call_reason, device_reason, gradients_with_graph
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def _results(
    x: torch.Tensor, weights: torch.Tensor, stacks: Stacks, index: torch.Tensor, variant: MoeExpertsVariant, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Route]:
    """The output, with ``keep`` both projections for the backward, and the route; rows of ``x`` are dense."""
    to = route(index, stacks[0].shape[0])
    products = products_for(x, stacks, variant)
    product, projected = products.up(x, to, stacks, variant, keep)
    return launch.combine(products.down(product, to, stacks, variant), to, weights, x.dtype), projected, to


class _Experts(torch.autograd.Function):
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
        x, weights = _with_dense_rows(x), weights.contiguous()
        out, projected, to = _results(x, weights, stacks, index, variant, any(ctx.needs_input_grad))
        ctx.variant = variant
        ctx.save_for_backward(x, weights, *stacks, index, projected, *to[:3])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weights, gate_up, down, gate_up_bias, down_bias, index, projected, slots, places, ends = ctx.saved_tensors
        stacks, variant, needed = (gate_up, down, gate_up_bias, down_bias), ctx.variant, ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            formula = functools.partial(_by_formula, index=index, variant=variant)
            return (*gradients_with_graph(formula, (x, weights, *stacks), needed, grad), None, None)
        to = Route(slots, places, ends, index.shape[-1])
        found = _gradients(x, weights, stacks, index, variant, projected, to, _with_dense_rows(grad), needed)
        return (*found, None, None)


def products_for(x: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant) -> Any:
    """Whose matrix products serve: PyTorch's where they can."""
    return torch_products if torch_products.fits(x, stacks, variant) else triton_products


def _gradients(
    x: torch.Tensor,
    weights: torch.Tensor,
    stacks: Stacks,
    index: torch.Tensor,
    variant: MoeExpertsVariant,
    projected: torch.Tensor,
    to: Route,
    grad: torch.Tensor,
    needed: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Of ``x``, the router's weights and the four stacks."""
    products = products_for(x, stacks, variant)
    rows = products.gathered(grad, to)
    dprojected, product, share = products.gate_backward(rows, to, stacks, variant, weights, projected)
    found: list[torch.Tensor | None] = [None] * 6
    if needed[0]:
        dx = products.input_gradient(dprojected, to, stacks, variant)
        found[0] = launch.combine(dx, to, None, x.dtype)
    known = (index >= 0) & (index < stacks[0].shape[0])
    expert = index.long().where(known, 0)
    down_bias = stacks[3]
    if needed[1]:
        chosen = share[to.places.clamp(min=0).long()]
        if down_bias is not None:
            chosen = chosen + (grad.float() @ down_bias.float().t()).gather(1, expert)
        found[1] = chosen.where(known, 0).to(weights.dtype)
    if needed[2] or needed[4]:
        found[2], found[4] = products.first_gradient(dprojected, x, to, stacks, variant)
    if needed[3]:
        found[3] = products.second_gradient(rows, product, to, stacks, variant)
    if needed[5] and down_bias is not None:
        found[5] = launch.weighted_sums(grad, to, weights, down_bias)
    return [gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True)]


def _with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_formula(
    x: torch.Tensor, weights: torch.Tensor, *stacks: Any, index: torch.Tensor, variant: MoeExpertsVariant
) -> torch.Tensor:
    return moe_experts(x, index, weights, stacks, variant)


def accepts(site: Site) -> Reason | None:
    """Every variant with a smooth activation, on a device that Triton runs on."""
    activation = site.variant.gate.activation
    if activation not in ACTIVATIONS:
        return Reason("activation", f"the activation is {activation}; the kernel has {', '.join(ACTIVATIONS)}")
    return device_reason(site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeExpertsVariant = site.variant

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        stacks = stacks_of(self, variant)
        if torch.is_grad_enabled():
            return _Experts.apply(hidden_states, top_k_weights, *stacks, top_k_index, variant)  # type: ignore[no-any-return]
        rows, weights = _with_dense_rows(hidden_states), top_k_weights.contiguous()
        return _results(rows, weights, stacks, top_k_index, variant, keep=False)[0]

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        if is_compiling():
            return "inside a compiler, which can't see into it"
        stacks = stacks_of(self, variant)
        reason = other_implementation(self, variant) or call_reason(hidden_states, top_k_weights, *stacks)
        if reason is not None:
            return reason
        if hidden_states.dim() != 2 or top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
            return "tokens of [tokens, hidden size] and choices of [tokens, chosen] only"
        if top_k_index.numel() >= 2**31:
            return "more choices than 32 bits count"
        if top_k_index.device != hidden_states.device:
            return "the tensors are on different devices"
        if any(stack is not None and stack.dtype != hidden_states.dtype for stack in stacks):
            return "tokens and weights have different dtypes"
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != hidden_states.dtype:
            return "autocast would make the original multiply in another dtype"
        return None

    return layer("TritonMoeExperts", forward, accepts_call)
