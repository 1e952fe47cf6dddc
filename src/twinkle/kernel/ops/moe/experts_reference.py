"""The experts of a mixture-of-experts layer (Shazeer et al., 2017, arXiv:1701.06538), as transformers stacks them.

``sum over the chosen experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x))``, with the weights of all experts
in two tensors: ``gate_up_proj [E, 2 I, H]`` (gate first) and ``down_proj [E, H, I]``. Some models store them the other
way round, take gate and up in turns, add biases, or clamp what comes out of the first projection.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Gate(NamedTuple):
    """``activation(gate) * (up + offset)``, where the gate is at most ``limit`` and ``up`` within plus or minus it.

    Attributes:
        activation: a key of :data:`~twinkle.kernel.ops.glu.reference.ACTIVATIONS`.
        limit: None for none.
        alpha: with ``silu``, the activation is ``gate * sigmoid(alpha * gate)``.
        offset: 1 in gpt-oss.
    """

    activation: str
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The gated product."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        value = gate * torch.sigmoid(gate * self.alpha) if self.alpha != 1.0 else ACTIVATIONS[self.activation](gate)
        return value * (up + self.offset)


@functools.cache
def compared_with(limit: float, dtype: torch.dtype) -> float:
    """What the gradient of ``clamp`` compares elements of a dtype with: up to torch 2.13 the limit as the dtype has it,
    later the limit itself. For gpt-oss' 7 it is the same."""
    with torch.inference_mode(False), torch.enable_grad():
        edge = torch.tensor(limit, dtype=dtype, device="cpu", requires_grad=True)
        (counts,) = torch.autograd.grad(edge.clamp(max=limit), edge)
    return edge.item() if counts else limit


@dataclasses.dataclass(frozen=True)
class MoeExpertsVariant:
    """What an experts module computes.

    Attributes:
        gate: between the two projections.
        transposed: weights are ``[E, H, 2 I]`` and ``[E, I, H]``.
        interleaved: gate and up are taken in turns from the first projection, not one after the other.
        bias: both projections have one, ``gate_up_proj_bias [E, 2 I]`` and ``down_proj_bias [E, H]``.
        implementation: which of transformers' implementations the configuration names; None where none is asked for.
    """

    gate: Gate
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    implementation: str | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but the activation is out of the ordinary."""
        return dataclasses.replace(self, implementation=None) == MoeExpertsVariant(Gate(self.gate.activation))


WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


Stacks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""``gate_up, down, gate_up_bias, down_bias``; the biases None where there are none."""


def stacks_of(module: Any, variant: MoeExpertsVariant) -> Stacks:
    """The weights of an experts module, read anew: an adapter or a parametrisation may compute them at each call."""
    if not variant.bias:
        return module.gate_up_proj, module.down_proj, None, None
    return module.gate_up_proj, module.down_proj, module.gate_up_proj_bias, module.down_proj_bias


def implementation_of(module: Any) -> str | None:
    """The key under which transformers looks for what computes these experts: ``config._experts_implementation``."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def other_implementation(module: Any, variant: MoeExpertsVariant) -> str | None:
    """Why the original is to serve a call: since the kernel was installed, the user has chosen another one."""
    asked = implementation_of(module)
    if asked == variant.implementation:
        return None
    return f"the configuration asks for the experts' implementation {asked!r} now, not {variant.implementation!r}"


def moe_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    stacks: Stacks,
    variant: MoeExpertsVariant,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Every token through its chosen experts.

    Written for clarity and for compilers: every expert sees every token, and the router's weights pick.

    Args:
        x: ``[T, H]``.
        index: ``[T, K]`` integer, the chosen experts; an index outside ``0 … E - 1`` chooses none.
        weights: ``[T, K]``, their weights.
        stacks: of shapes that the variant tells.
        compute_dtype: instead of ``x``'s.

    Returns:
        ``[T, H]`` in ``x``'s dtype.
    """
    gate_up, down, gate_up_bias, down_bias = stacks
    dtype = compute_dtype or x.dtype
    chosen = torch.arange(gate_up.shape[0], device=x.device)
    share = ((index[..., None] == chosen) * weights[..., None].to(dtype)).sum(1)
    first, second = ("th,ehi->eti", "eti,eih->eth") if variant.transposed else ("th,eih->eti", "eti,ehi->eth")
    projected = torch.einsum(first, x.to(dtype), gate_up.to(dtype))
    if gate_up_bias is not None:
        projected = projected + gate_up_bias.to(dtype)[:, None]
    gate, up = (projected[..., ::2], projected[..., 1::2]) if variant.interleaved else projected.chunk(2, dim=-1)
    result = torch.einsum(second, variant.gate(gate, up), down.to(dtype))
    if down_bias is not None:
        result = result + down_bias.to(dtype)[:, None]
    return torch.einsum("eth,te->th", result, share).to(x.dtype)


def small_experts(module: nn.Module, variant: MoeExpertsVariant, training: bool = True) -> Any:
    """A stand-in with four small experts."""
    sizes = {"num_experts": EXPERTS, "hidden_dim": HIDDEN, "intermediate_dim": INTERMEDIATE}
    sizes |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE}
    shapes: list[tuple[int, ...]] = [(EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)]
    if variant.transposed:
        shapes = [(shape[0], shape[2], shape[1]) for shape in shapes]
    if variant.bias:
        shapes += [(EXPERTS, 2 * INTERMEDIATE), (EXPERTS, HIDDEN)]
    weights: dict[str, Any] = {
        name: nn.Parameter(random_tensor(*shape, seed=70 + number), requires_grad=False)
        for number, (name, shape) in enumerate(zip((*WEIGHTS, *BIASES), shapes, strict=False))
    }
    return stand_in(module, training=training, **{k: v for k, v in sizes.items() if k in module.__dict__}, **weights)


def small_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, chosen experts and their weights; one expert gets no token."""
    index = torch.tensor([[t % 3, (t + 1) % 3] for t in range(TOKENS)], device="cpu")
    return random_tensor(TOKENS, HIDDEN, seed=72), index, random_tensor(TOKENS, TOP_K, seed=73).abs()


def _gates(module: nn.Module) -> Iterator[Gate]:
    """The gates that a module may have, by the numbers among its attributes."""
    limit, alpha = (module.__dict__.get(name) for name in ("limit", "alpha"))
    for activation in ACTIVATIONS:
        yield Gate(activation)
        if isinstance(limit, (int, float)):
            yield Gate(activation, float(limit))
    if isinstance(limit, (int, float)) and isinstance(alpha, (int, float)):
        yield Gate("silu", float(limit), float(alpha), 1.0)


@probed("moe_experts")
def probe(site: Site) -> MoeExpertsVariant | Reason:
    """Runs the class's own forward on four small experts and compares it with each gate."""
    module = site.module
    assert module is not None
    shapes = {name: len(shape_of(p)) for name, p in module._parameters.items() if p is not None}
    stacks, biases = dict.fromkeys(WEIGHTS, 3), dict.fromkeys(BIASES, 2)
    if shapes not in (stacks, stacks | biases):
        return Reason("not-this-op", f"{site.owner.__qualname__} has parameters {shapes}, not two stacks of weights")
    transposed = bool(getattr(module, "is_transposed", False))
    interleaved = not getattr(module, "is_concatenated", True)
    bias, implementation = shapes != stacks, implementation_of(module)
    fitting = [MoeExpertsVariant(gate, transposed, interleaved, bias, implementation) for gate in _gates(module)]
    _, index, shares = small_inputs()
    inputs = uneven(TOKENS, HIDDEN, seed=72), index, shares
    for training in (True, False):
        twin = small_experts(module, fitting[0], training)
        result = inspect.unwrap(site.original)(twin, *(t.clone() for t in inputs))
        fitting = [v for v in fitting if agree(result, moe_experts(*inputs, stacks_of(twin, v), v))]
        if not fitting:
            return Reason("not-this-op", f"{site.owner.__qualname__} computes more than a gated MLP per expert")
    return fitting[0]


def build(variant: MoeExpertsVariant, compute_dtype: torch.dtype | None = None) -> type[nn.Module]:
    """The maths as a layer class. That choices and weights can be left out is for gpt-oss, where they can; in name."""

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        stacks = stacks_of(self, variant)
        return moe_experts(hidden_states, top_k_index, top_k_weights, stacks, variant, compute_dtype)

    return layer("ReferenceMoeExperts", forward)


def example(site: Site, variant: MoeExpertsVariant) -> Example:
    """Four small experts, one of which gets no token."""
    assert site.module is not None
    return Example(small_experts(site.module, variant), small_inputs())
