"""The ``triton`` backend of ``moe_experts``: rows sorted by expert, the gate and the router's weights fused, both ways.

The matrix products are PyTorch's where they can take what is there, else our own. The router's weights are applied
where the experts' results are summed up. Nothing waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe import torch_products, triton_products
from twinkle.kernel.ops.moe import triton_launch as launch
from twinkle.kernel.ops.moe.calls import SMOOTH, call_reason, differentiable
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, Stacks, other_implementation, stacks_of
from twinkle.kernel.ops.moe.routing import Route
from twinkle.kernel.ops.moe.triton_routing import route
from twinkle.kernel.ops.triton_support import call_reason as tensors_reason
from twinkle.kernel.ops.triton_support import device_reason
from twinkle.kernel.ops.worthwhile import slower_for
from twinkle.reasons import Reason
from twinkle.triton_dot import multiplies
from twinkle.triton_programs import interpreted

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


def _results(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Route]:
    x, to = _with_dense_rows(x), route(index, stacks[0].shape[0])
    products = products_for(x, stacks, variant)
    product, projected = products.up(x, to, stacks, variant, keep)
    y = products.down(product, to, stacks, variant)
    return launch.combine(y, to.places, weights.contiguous(), x.dtype), projected, to


def products_for(x: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant) -> Any:
    """Whose matrix products serve: PyTorch's where they can."""
    return torch_products if torch_products.fits(x, stacks, variant) else triton_products


def _interpreter_reason(x: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant) -> str | None:
    """Why Triton's interpreter can't have a call: our own products need ``tl.dot``."""
    if not interpreted() or products_for(x, stacks, variant) is not triton_products or multiplies(x.dtype):
        return None
    return f"Triton's interpreter gives wrong products of {x.dtype}"


def _gradients(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    stacks: Stacks,
    variant: MoeExpertsVariant,
    projected: torch.Tensor,
    to: Route,
    grad: torch.Tensor,
    needed: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Of ``x``, the router's weights and the four stacks."""
    x, grad, weights = _with_dense_rows(x), _with_dense_rows(grad), weights.contiguous()
    products = products_for(x, stacks, variant)
    rows = products.gathered(grad, to)
    dprojected, product, share = products.gate_backward(rows, to, stacks, variant, weights, projected)
    found: list[torch.Tensor | None] = [None] * 6
    if needed[0]:
        dx = products.input_gradient(dprojected, to, stacks, variant)
        found[0] = launch.combine(dx, to.places, None, x.dtype)
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


_experts = differentiable(_results, _gradients)


def accepts(site: Site) -> Reason | None:
    """Every variant with a smooth activation, on a device that Triton runs on."""
    activation = site.variant.gate.activation
    if activation not in SMOOTH:
        return Reason("activation", f"the activation is {activation}; the kernel has {', '.join(SMOOTH)}")
    return device_reason(site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeExpertsVariant = site.variant
    slower = slower_for("moe_experts", "triton")

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        stacks = stacks_of(self, variant)
        if torch.is_grad_enabled():
            return _experts(hidden_states, top_k_weights, *stacks, top_k_index, variant)
        return _results(hidden_states, top_k_index, top_k_weights, stacks, variant, keep=False)[0]

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        if is_compiling():
            return "inside a compiler, which can't see into it"
        stacks = stacks_of(self, variant)
        return (
            other_implementation(self, variant)
            or tensors_reason(hidden_states, top_k_weights, *stacks)
            or call_reason(hidden_states, top_k_index, top_k_weights, stacks)
            or _interpreter_reason(hidden_states, stacks, variant)
            or slower(hidden_states)
        )

    return layer("TritonMoeExperts", forward, accepts_call)
