"""A mixture-of-experts block: the router chooses, the experts compute, a shared expert may be added.

``experts(x, chosen, weights) [+ sigmoid(shared_expert_gate(x)) * shared_expert(x)]``. The children are only called.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.ops.moe.experts_reference import EXPERTS, HIDDEN, TOP_K
from twinkle.kernel.probe import agree, probed, random_tensor, stand_in, uneven
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


@dataclasses.dataclass(frozen=True)
class MoeBlockVariant:
    """Whether the block adds a gated shared expert."""

    shared: bool


def nothing_to_fuse(variant: MoeBlockVariant) -> Reason | None:
    """Why a block is not for a kernel: it only calls its router and experts, which have entries of their own."""
    if variant.shared:
        return None
    return Reason("nothing-to-fuse", "without a shared expert a block only calls its router and its experts")


def moe_block(module: Any, hidden_states: torch.Tensor, shared: bool) -> torch.Tensor:
    """Router, experts and shared expert of a block.

    Args:
        module: has ``gate`` (returns logits, weights ``[T, K]`` and indices ``[T, K]``), ``experts`` and, when
            ``shared``, ``shared_expert`` and ``shared_expert_gate``.
        hidden_states: ``[B, S, H]``.

    Returns:
        ``[B, S, H]``.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, index = module.gate(tokens)
    result = module.experts(tokens, index, weights)
    if shared:
        result = result + torch.sigmoid(module.shared_expert_gate(tokens)) * module.shared_expert(tokens)
    return result.reshape(hidden_states.shape)


class _Router(nn.Module):
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = tokens[:, :EXPERTS]
        weights, index = logits.softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights, index


class _Experts(nn.Module):
    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return tokens * (weights * (index + 1)).sum(-1, keepdim=True)


class _Scaled(nn.Module):
    def __init__(self, scale: float, width: int) -> None:
        super().__init__()
        self.scale, self.width = scale, width

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale * tokens[:, : self.width].sin()


def small_block(module: nn.Module, shared: bool, training: bool = True) -> Any:
    """A stand-in whose children are small functions."""
    children: dict[str, Any] = {"gate": _Router(), "experts": _Experts()}
    if shared:
        children |= {"shared_expert": _Scaled(3.0, HIDDEN), "shared_expert_gate": _Scaled(0.5, 1)}
    return stand_in(module, training=training, **children)


@probed("moe_block")
def probe(site: Site) -> MoeBlockVariant | Reason:
    """Runs the block's own forward with small children and compares it with the reference."""
    assert site.module is not None
    children = set(site.module._modules)
    shared = "shared_expert" in children
    parameters = [p for p in site.module._parameters.values() if p is not None]
    if children != set(called_children(MoeBlockVariant(shared))) or parameters:
        return Reason("not-this-op", f"{site.owner.__qualname__} has children {', '.join(sorted(children))}")
    x = uneven(2, 3, HIDDEN, seed=80)
    for training in (True, False):
        twin = small_block(site.module, shared, training)
        if not agree(site.original(twin, x.clone()), moe_block(twin, x, shared)):
            text = f"{site.owner.__qualname__} computes more than router, experts and shared expert"
            return Reason("not-this-op", text)
    return MoeBlockVariant(shared)


def called_children(variant: MoeBlockVariant) -> tuple[str, ...]:
    """All of them."""
    return ("gate", "experts", "shared_expert", "shared_expert_gate") if variant.shared else ("gate", "experts")


def build(variant: MoeBlockVariant, compute_dtype: torch.dtype | None = None) -> type[nn.Module]:
    """The maths as a layer class; the children compute in their own dtype."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return moe_block(self, hidden_states, variant.shared)

    return layer("ReferenceMoeBlock", forward)


def example(site: Site, variant: MoeBlockVariant) -> Example:
    """A block with small children."""
    assert site.module is not None
    return Example(small_block(site.module, variant.shared), (random_tensor(2, 3, HIDDEN, seed=80),))
