"""The ``triton`` backend of ``moe_experts``: rows sorted by expert, the gate inside the first product, both ways.

The rows of the tokens are gathered while they are read and never copied; the router's weights are applied where the
experts' results are summed up. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe import triton_launch as launch
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, moe_experts, stacks_of
from twinkle.kernel.ops.moe.routing import Route, route
from twinkle.kernel.ops.triton_support import call_reason, device_reason, gradients_with_graph
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


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
        x, weights = _with_dense_rows(x), weights.contiguous()
        to = route(index, gate_up.shape[0])
        first = launch.gate_up_projection(gate_up, variant.transposed, variant.interleaved)
        second = launch.down_projection(down, variant.transposed)
        width = gate_up.shape[2 if variant.transposed else 1] // 2
        keep = any(ctx.needs_input_grad)
        bias_at = _bias_projection(gate_up_bias, variant)
        product, projected = launch.up(x, to, gate_up, first, gate_up_bias, bias_at, variant.gate, width, keep)
        y = launch.rows(product, to, down, second, x.shape[1], down_bias)
        ctx.variant = variant
        ctx.save_for_backward(x, weights, gate_up, down, gate_up_bias, down_bias, index, projected, *to[:3])
        return launch.combine(y, to, weights, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weights, gate_up, down, gate_up_bias, down_bias, index, projected, *to = ctx.saved_tensors
        inputs, variant = (x, weights, gate_up, down, gate_up_bias, down_bias), ctx.variant
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # the gradient is to be differentiated again
            formula = functools.partial(_by_formula, index=index, variant=variant)
            return (*gradients_with_graph(formula, inputs, needed, grad), None, None)
        slots, places, ends = to
        rows = Route(slots, places, ends, index.shape[-1])
        found = _gradients(inputs, index, variant, projected, rows, _with_dense_rows(grad), needed)
        return (*found, None, None)


def _gradients(
    inputs: tuple[Any, ...],
    index: torch.Tensor,
    variant: MoeExpertsVariant,
    projected: torch.Tensor,
    to: Route,
    grad: torch.Tensor,
    needed: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    x, weights, gate_up, down, gate_up_bias, down_bias = inputs
    first = launch.gate_up_projection(gate_up, variant.transposed, variant.interleaved)
    second = launch.down_projection(down, variant.transposed)
    dprojected, product, share = launch.gate_backward(grad, to, down, second, weights, projected, variant.gate)
    found: list[torch.Tensor | None] = [None] * 6
    if needed[0]:
        backwards = first._replace(column=first.row, row=first.column)
        dx = launch.rows(dprojected, to, gate_up, backwards, x.shape[1], parts=2)
        found[0] = launch.combine(dx, to, None, x.dtype)
    if needed[1]:
        chosen = share[to.places.clamp(min=0).long()].where(to.places >= 0, 0)
        if down_bias is not None:
            of_bias = grad.float() @ down_bias.float().t()
            known = (index >= 0) & (index < down_bias.shape[0])
            chosen += of_bias.gather(1, index.long().where(known, 0)).where(known, 0)
        found[1] = chosen.to(weights.dtype)
    if needed[2] or needed[4]:
        dgate_up, dbias = torch.empty_like(gate_up), None if gate_up_bias is None else torch.empty_like(gate_up_bias)
        at = launch.gate_up_projection(dgate_up, variant.transposed, variant.interleaved)
        bias_at = _bias_projection(dbias, variant)
        launch.weight_gradient(dprojected, x, to, dgate_up, at, dbias, bias_at, b_by_token=True)
        found[2], found[4] = dgate_up, dbias
    if needed[3]:
        ddown = torch.empty_like(down)
        at = launch.down_projection(ddown, variant.transposed)
        launch.weight_gradient(grad, product, to, ddown, at, a_by_token=True)
        found[3] = ddown
    if needed[5]:
        known = (index >= 0) & (index < down.shape[0])
        shares = torch.zeros(x.shape[0], down.shape[0], dtype=torch.float32, device=x.device)
        shares.scatter_add_(1, index.long().where(known, 0), weights.float().where(known, 0))
        found[5] = (shares.t() @ grad.float()).to(down_bias.dtype)
    return [gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True)]


def _bias_projection(bias: torch.Tensor | None, variant: MoeExpertsVariant) -> launch.Projection | None:
    """Of ``[E, 2 I]``, as the first projection's outputs lie."""
    if bias is None:
        return None
    expert, column = bias.stride()
    if variant.interleaved:
        return launch.Projection(expert, 2 * column, 0, column)
    return launch.Projection(expert, column, 0, bias.shape[1] // 2 * column)


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
        return _Experts.apply(hidden_states, top_k_weights, *stacks, top_k_index, variant)  # type: ignore[no-any-return]

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        if is_compiling():
            return "inside a compiler, which can't see into it"
        stacks = stacks_of(self, variant)
        reason = call_reason(hidden_states, top_k_weights, *stacks)
        if reason is not None:
            return reason
        if hidden_states.dim() != 2 or top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
            return "tokens of [tokens, hidden size] and choices of [tokens, chosen] only"
        if top_k_index.device != hidden_states.device:
            return "the tensors are on different devices"
        if any(stack is not None and stack.dtype != hidden_states.dtype for stack in stacks):
            return "tokens and weights have different dtypes"
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != hidden_states.dtype:
            return "autocast would make the original multiply in another dtype"
        return None

    return layer("TritonMoeExperts", forward, accepts_call)
