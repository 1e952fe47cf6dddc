"""The router of a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; the softmax comes first, as in Switch).

``logits = x @ weight.T``; the ``top_k`` largest of ``softmax(logits)`` and their numbers. They may be divided by
their sum.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.probe import agree, cast, probed, random_tensor, shape_of, stand_in
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

EXPERTS, HIDDEN, TOKENS, TOP_K = 6, 10, 12, 3

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``logits [T, E]``, ``scores [T, K]`` and ``index [T, K]``, int64; largest first."""


@dataclasses.dataclass(frozen=True)
class MoeRouterVariant:
    """What a router computes.

    Attributes:
        normalized: the scores of a token are divided by their sum.
        wide: the scores stay in fp32; else they get the dtype of the logits.
    """

    normalized: bool
    wide: bool


def scores_of(logits: torch.Tensor, index: torch.Tensor, variant: MoeRouterVariant) -> torch.Tensor:
    """The scores ``[T, K]`` of chosen experts, in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.softmax(-1, dtype=wide).gather(-1, index)
    return scores / scores.sum(-1, keepdim=True) if variant.normalized else scores


def moe_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    variant: MoeRouterVariant,
    compute_dtype: torch.dtype | None = None,
) -> Routed:
    """Which experts each token goes to.

    Args:
        x: ``[..., H]``, of T tokens in all.
        weight: ``[E, H]``.
        top_k: K, at most E.
        compute_dtype: instead of ``x``'s.
    """
    dtype = compute_dtype or x.dtype
    logits = nn.functional.linear(x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype))
    wide = torch.promote_types(dtype, torch.float32)
    index = logits.softmax(-1, dtype=wide).topk(top_k, dim=-1).indices
    scores = scores_of(logits, index, variant)
    return logits, scores if variant.wide else scores.to(dtype), index


def small_router(module: nn.Module, training: bool = True) -> Any:
    """A stand-in with six experts, whose logits are the first numbers of a token."""
    sizes = {"num_experts": EXPERTS, "hidden_dim": HIDDEN, "hidden_size": HIDDEN, "top_k": TOP_K}
    weight = nn.Parameter(torch.eye(EXPERTS, HIDDEN), requires_grad=False)
    return stand_in(
        module, training=training, weight=weight, **{k: v for k, v in sizes.items() if k in module.__dict__}
    )


def small_tokens(spread: float = 1.0) -> torch.Tensor:
    """``[2, T / 2, H]``: no two logits of a token are nearly the same, so that every dtype chooses alike."""
    ranks = random_tensor(TOKENS, EXPERTS, seed=74).argsort(-1).float()
    rest = random_tensor(TOKENS, HIDDEN - EXPERTS, seed=75)
    logits = (ranks + random_tensor(TOKENS, EXPERTS, seed=76).tanh() / 4) * spread
    return torch.cat([logits, rest], dim=-1).view(2, TOKENS // 2, HIDDEN)


def _same(result: Any, expected: Routed, mismatches: float) -> bool:
    if not isinstance(result, tuple) or len(result) != 3:
        return False
    logits, scores, index = result
    return (
        agree(logits, expected[0])
        and agree(scores, expected[1], mismatches)
        and isinstance(index, torch.Tensor)
        and index.dtype == expected[2].dtype
        and torch.equal(index, expected[2])
    )


@probed("moe_router")
def probe(site: Site) -> MoeRouterVariant | Reason:
    """Runs the class's own forward on a few tokens, in fp32 and bf16, and compares it with each variant."""
    module, name = site.module, site.owner.__qualname__
    assert module is not None
    shapes = {name: len(shape_of(tensor)) for name, tensor in _tensors(module)}
    if shapes != {"weight": 2} or module._modules or "top_k" not in module.__dict__:
        return Reason("not-this-op", f"{name} has more than a weight, or doesn't say how many experts it chooses")
    fitting = [MoeRouterVariant(*flags) for flags in itertools.product((True, False), repeat=2)]
    for training, dtype, spread in itertools.product((True, False), (torch.float32, torch.bfloat16), (0.05, 1.0, 8.0)):
        twin, x = cast(small_router(module, training), dtype), small_tokens(spread).to(dtype)
        result = site.original(twin, x.clone())
        fitting = [v for v in fitting if _same(result, moe_router(x, twin.weight, TOP_K, v), mismatches=0.05)]
        if not fitting:
            return Reason("not-this-op", f"{name} computes more than the largest of a softmax")
    return fitting[0]


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    everything = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in everything if tensor is not None]


def build(variant: MoeRouterVariant, compute_dtype: torch.dtype | None = None) -> type[nn.Module]:
    """The maths as a layer class."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Routed:
        return moe_router(hidden_states, self.weight, self.top_k, variant, compute_dtype)

    return layer("ReferenceMoeRouter", forward)


def example(site: Site, variant: MoeRouterVariant) -> Example:
    """A few tokens that choose three of six experts."""
    assert site.module is not None
    return Example(small_router(site.module), (small_tokens(),))
