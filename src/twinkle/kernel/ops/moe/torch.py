"""The ``torch`` backend of ``moe_experts``: PyTorch's grouped matrix product, with few passes over the rows.

Rows are sorted by expert as for the Triton programs. What goes back to the tokens is gathered by each token's places,
both ways: adding rows up where they belong is slow on every device. Under a compiler, which sees through all of it, the
same formula is differentiated by PyTorch and fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling

from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe.calls import SMOOTH, call_reason, differentiable
from twinkle.kernel.ops.moe.experts_reference import (
    Gate,
    MoeExpertsVariant,
    Stacks,
    compared_with,
    other_implementation,
    stacks_of,
)
from twinkle.kernel.ops.moe.grouped_mm import has_grouped_mm, inwards, stack_gradient, whole_16_bytes
from twinkle.kernel.ops.moe.routing import Route, route
from twinkle.kernel.ops.torch_support import DTYPES, PLAIN, transformed
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


# --- the formula ------------------------------------------------------------------------------------------------------


def grouped_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant
) -> torch.Tensor:
    """Every token through its chosen experts, see :func:`~twinkle.kernel.ops.moe.experts_reference.moe_experts`."""
    to = route(index, stacks[0].shape[0])
    nobody = _nobody(to)
    # What a product leaves as it was is not a number perhaps, in either direction.
    rows = _rows(x, to).masked_fill(nobody, 0)
    projected = _projected(rows, to, stacks, variant).masked_fill(nobody, 0)
    result = F.grouped_mm(_gated(projected, variant), inwards(stacks[1], variant), offs=to.ends).masked_fill(nobody, 0)
    return _combined(result, index, weights, to, stacks[3])


def _nobody(to: Route) -> torch.Tensor:
    """``[S, 1]``: rows behind those of the last expert, which a grouped product leaves as they were."""
    return (torch.arange(to.slots.numel(), device=to.slots.device) >= to.ends[-1])[:, None]


def _rows(tokens: torch.Tensor, to: Route) -> torch.Tensor:
    """Each slot's token's row."""
    return tokens[to.tokens]


def _projected(rows: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant) -> torch.Tensor:
    product, bias = F.grouped_mm(rows, inwards(stacks[0], variant), offs=to.ends), stacks[2]
    if bias is None:
        return product
    # As a product, whose gradient adds up a bias's rows in fp32, and in pieces; that of an index doesn't.
    return product + F.one_hot(_experts(to), len(bias)).to(bias.dtype) @ bias


def _experts(to: Route) -> torch.Tensor:
    """Each row's expert; the last one's for those of nobody."""
    numbers = torch.arange(to.slots.numel(), dtype=torch.int32, device=to.ends.device)
    return torch.searchsorted(to.ends, numbers, right=True).clamp(max=to.ends.numel() - 1)


def _halves(projected: torch.Tensor, variant: MoeExpertsVariant) -> tuple[torch.Tensor, torch.Tensor]:
    if variant.interleaved:
        return projected[:, ::2], projected[:, 1::2]
    gate, up = projected.chunk(2, dim=-1)
    return gate, up


def _gated(projected: torch.Tensor, variant: MoeExpertsVariant) -> torch.Tensor:
    return variant.gate(*_halves(projected, variant))


def _combined(
    result: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, to: Route, bias: torch.Tensor | None
) -> torch.Tensor:
    """Each token's results, weighted and added up, with the experts' biases: ``[T, H]``."""
    chosen = _of_tokens(result, to)
    if weights.dtype != result.dtype:
        total = (chosen * weights[..., None]).sum(1).to(result.dtype)
    elif torch.is_grad_enabled():
        total = torch.bmm(weights[:, None], chosen).squeeze(1)
    else:  # what an autograd.Function returns must be no view, or the model can't add to it in place
        total = result.new_empty(len(chosen), result.shape[1])
        torch.bmm(weights[:, None], chosen, out=total[:, None])
    return total if bias is None else total + _shares(index, weights, len(bias)).to(bias.dtype) @ bias


def _of_tokens(rows: torch.Tensor, to: Route) -> torch.Tensor:
    """Rows back where the slots were: ``[T, K, ...]``. Gathered: adding them up where they belong is slow."""
    places = torch.empty_like(to.slots)
    places[to.slots] = torch.arange(to.slots.numel(), device=to.slots.device)
    return rows[places].view(*to.places.shape, -1)


def _shares(index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """``[T, E]`` fp32: each token's weight for each expert."""
    known = (index >= 0) & (index < experts)
    total = torch.zeros(len(index), experts, dtype=torch.float32, device=index.device)
    return total.scatter_add(1, index.where(known, 0), weights.float().where(known, 0))


# --- its gradients ----------------------------------------------------------------------------------------------------


def _results(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Route]:
    to = route(index, stacks[0].shape[0])
    projected = _projected(_rows(x, to), to, stacks, variant)
    result = F.grouped_mm(_gated(projected, variant), inwards(stacks[1], variant), offs=to.ends)
    return _combined(result.masked_fill_(_nobody(to), 0), index, weights, to, stacks[3]), projected, to


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
    nobody, (gate_up, down, gate_up_bias, down_bias) = _nobody(to), stacks
    found: list[torch.Tensor | None] = [None] * 6
    grads = _rows(grad, to)
    share = weights.reshape(-1)[to.slots, None]
    back = F.grouped_mm(grads, inwards(down, variant).transpose(1, 2), offs=to.ends)
    product = _gated(projected, variant)
    if needed[1]:
        shares = (back.float() * product.float()).sum(-1, keepdim=True).masked_fill(nobody, 0)
        dweights = _of_tokens(shares, to).squeeze(-1)
        if down_bias is not None:
            known = (index >= 0) & (index < len(down_bias))
            dweights += (grad.float() @ down_bias.float().t()).gather(1, index.where(known, 0)).where(known, 0)
        found[1] = dweights.to(weights.dtype)
    if needed[3]:
        found[3] = stack_gradient(grads, (product * share).to(product.dtype), to, variant)
    if needed[5] and down_bias is not None:
        found[5] = (_shares(index, weights, len(down_bias)).t() @ grad.float()).to(down_bias.dtype)
    if not (needed[0] or needed[2] or needed[4]):
        return found
    dprojected = _gate_backward((back * share).to(back.dtype), projected, variant)
    if needed[0]:
        dx = F.grouped_mm(dprojected, inwards(gate_up, variant).transpose(1, 2), offs=to.ends)
        found[0] = _of_tokens(dx.masked_fill_(nobody, 0), to).sum(1)
    if needed[2]:
        found[2] = stack_gradient(dprojected, _rows(x, to), to, variant)
    if needed[4] and gate_up_bias is not None:
        chosen = F.one_hot(_experts(to), len(gate_up_bias)).float()
        found[4] = (chosen.t() @ dprojected.float().masked_fill(nobody, 0)).to(gate_up_bias.dtype)
    return found


def _gate_backward(grad: torch.Tensor, projected: torch.Tensor, variant: MoeExpertsVariant) -> torch.Tensor:
    """From the gated product's gradient ``[S, I]`` to the projections' ``[S, 2 I]``."""
    gate, up = _halves(projected, variant)
    dgate, dup = _of_gate(grad, gate, up, variant.gate)
    if variant.interleaved:
        return torch.stack((dgate, dup), dim=-1).flatten(1)
    return torch.cat((dgate, dup), dim=-1)


def _of_gate(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, in closed form."""
    limited, bounded = gate, up
    if kind.limit is not None:
        limited, bounded = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    inner = grad * (bounded + kind.offset)
    if kind.alpha != 1.0:
        sigmoid = torch.sigmoid(limited * kind.alpha)
        value = limited * sigmoid
        dgate = inner * (sigmoid + kind.alpha * value * (1 - sigmoid))
    elif kind.activation == "silu":
        value, dgate = F.silu(limited), torch.ops.aten.silu_backward(inner, limited)
    else:
        approximate = "tanh" if kind.activation == "gelu_tanh" else "none"
        value = F.gelu(limited, approximate=approximate)
        dgate = torch.ops.aten.gelu_backward(inner, limited, approximate=approximate)
    dup = grad * value
    if kind.limit is not None:  # what was clamped has no gradient
        dgate = dgate.masked_fill(_above(gate, kind.limit), 0)
        dup = dup.masked_fill(_above(up.abs(), kind.limit), 0)
    return dgate, dup


def _above(x: torch.Tensor, limit: float) -> torch.Tensor:
    """What is clamped to a limit, as PyTorch decides it."""
    limit = compared_with(limit, x.dtype)
    # A comparison rounds the limit to the dtype: where that is above it, elements that equal it are too.
    return x >= limit if torch.tensor(limit, dtype=x.dtype, device="cpu").item() > limit else x > limit


_experts_with_gradients = differentiable(_results, _gradients)


# --- the backend ------------------------------------------------------------------------------------------------------


def accepts(site: Site) -> Reason | None:
    """Every variant with a smooth activation, where PyTorch has the product."""
    activation = site.variant.gate.activation
    if activation not in SMOOTH:
        return Reason("activation", f"the activation is {activation}; the kernel has {', '.join(SMOOTH)}")
    if not has_grouped_mm(site.device):
        return Reason("device", f"PyTorch has no grouped matrix product on {site.device.type} here")
    return None


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeExpertsVariant = site.variant

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        stacks = stacks_of(self, variant)
        if is_compiling():
            return grouped_experts(hidden_states, top_k_index, top_k_weights, stacks, variant)
        return _experts_with_gradients(hidden_states, top_k_weights, *stacks, top_k_index, variant)

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        return other_implementation(self, variant) or _call_reason(
            hidden_states, top_k_index, top_k_weights, stacks_of(self, variant)
        )

    return layer("TorchMoeExperts", forward, accepts_call)


def _call_reason(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks) -> str | None:
    """Why a call can't be served."""
    reason = call_reason(x, index, weights, stacks)
    if reason is not None:
        return reason
    there = [tensor for tensor in (x, weights, *stacks) if tensor is not None]
    if any(type(tensor) not in PLAIN for tensor in there):
        return "a tensor subclass"
    if any(tensor.device != x.device for tensor in there):
        return "the tensors are on different devices"
    if x.dtype not in DTYPES:
        return "the dtype is none of fp32, bf16, fp16"
    if x.dtype != torch.bfloat16 and (is_compiling() or x.device.type != "cpu"):
        return "there PyTorch multiplies groups in bf16 only"
    if not whole_16_bytes(*stacks[:2]):
        return "rows of the weights aren't whole 16 bytes, which PyTorch's grouped product asks for"
    if x.numel() == 0:
        return "an empty tensor"
    return transformed()
