"""The experts of a mixture-of-experts layer (Shazeer et al., 2017, arXiv:1701.06538), as transformers stacks them.

``sum over the chosen experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x))``, with the weights of all experts
in two tensors: ``gate_up_proj [E, 2 I, H]`` (gate first) and ``down_proj [E, H, I]``.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.ops.glu.reference import ACTIVATIONS
from twinkle.kernel.probe import agree, probed, random_tensor, shape_of, stand_in, uneven
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

# Rows are multiples of 16 bytes in every dtype, as grouped matrix products ask for; no two sizes are equal.
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 8, 24, 16, 2


@dataclasses.dataclass(frozen=True)
class MoeExpertsVariant:
    """What an experts module computes.

    Attributes:
        activation: a key of :data:`~twinkle.kernel.ops.glu.reference.ACTIVATIONS`.
    """

    activation: str


def moe_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Every token through its chosen experts.

    Written for clarity and for compilers: every expert sees every token, and the router's weights pick.

    Args:
        x: ``[T, H]``.
        index: ``[T, K]`` integer, the chosen experts; an index outside ``0 … E - 1`` chooses none.
        weights: ``[T, K]``, their weights.
        gate_up: ``[E, 2 I, H]``; down: ``[E, H, I]``.
        activation: of the gate.
        compute_dtype: instead of ``x``'s.

    Returns:
        ``[T, H]`` in ``x``'s dtype.
    """
    dtype = compute_dtype or x.dtype
    chosen = torch.arange(gate_up.shape[0], device=x.device)
    share = ((index[..., None] == chosen) * weights[..., None].to(dtype)).sum(1)
    gate, up = torch.einsum("th,eih->eti", x.to(dtype), gate_up.to(dtype)).chunk(2, dim=-1)
    hidden = ACTIVATIONS[activation](gate) * up
    return torch.einsum("eti,ehi,te->th", hidden, down.to(dtype), share).to(x.dtype)


def small_experts(module: nn.Module, training: bool = True) -> Any:
    """A stand-in with four small experts."""
    sizes = {"num_experts": EXPERTS, "hidden_dim": HIDDEN, "intermediate_dim": INTERMEDIATE}
    sizes |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE}
    weights: dict[str, Any] = {
        "gate_up_proj": nn.Parameter(random_tensor(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=70), requires_grad=False),
        "down_proj": nn.Parameter(random_tensor(EXPERTS, HIDDEN, INTERMEDIATE, seed=71), requires_grad=False),
    }
    return stand_in(module, training=training, **{k: v for k, v in sizes.items() if k in module.__dict__}, **weights)


def small_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, chosen experts and their weights; one expert gets no token."""
    index = torch.tensor([[t % 3, (t + 1) % 3] for t in range(TOKENS)], device="cpu")
    return random_tensor(TOKENS, HIDDEN, seed=72), index, random_tensor(TOKENS, TOP_K, seed=73).abs()


@probed("moe_experts")
def probe(site: Site) -> MoeExpertsVariant | Reason:
    """Runs the class's own forward on four small experts and compares it with each activation."""
    assert site.module is not None
    shapes = {name: len(shape_of(p)) for name, p in site.module._parameters.items() if p is not None}
    if shapes != {"gate_up_proj": 3, "down_proj": 3}:
        return Reason("not-this-op", f"{site.owner.__qualname__} has parameters {shapes}, not two stacks of weights")
    _, index, shares = small_inputs()
    inputs = uneven(TOKENS, HIDDEN, seed=72), index, shares
    fitting = list(ACTIVATIONS)
    for training in (True, False):
        twin = small_experts(site.module, training)
        result = inspect.unwrap(site.original)(twin, *(t.clone() for t in inputs))
        weights = twin.gate_up_proj, twin.down_proj
        fitting = [activation for activation in fitting if agree(result, moe_experts(*inputs, *weights, activation))]
    if not fitting:
        return Reason("not-this-op", f"{site.owner.__qualname__} computes more than a gated MLP per expert")
    return MoeExpertsVariant(fitting[0])


def build(variant: MoeExpertsVariant, compute_dtype: torch.dtype | None = None) -> type[nn.Module]:
    """The maths as a layer class."""

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return moe_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            variant.activation,
            compute_dtype,
        )

    return layer("ReferenceMoeExperts", forward)


def example(site: Site, variant: MoeExpertsVariant) -> Example:
    """Four small experts, one of which gets no token."""
    assert site.module is not None
    return Example(small_experts(site.module), small_inputs())
