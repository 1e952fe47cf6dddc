"""The same products by PyTorch's grouped matrix product, with our Triton programs for what lies between them.

Its rows have to be there, so the tokens' are gathered first. See :mod:`twinkle.kernel.ops.moe.triton_products`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twinkle.kernel.ops.moe import triton_launch as launch
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, Stacks
from twinkle.kernel.ops.moe.grouped_mm import has_grouped_mm, inwards, stack_gradient, whole_16_bytes
from twinkle.kernel.ops.moe.routing import Route


def fits(x: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant) -> bool:
    """Whether it can take them: on a CPU or an NVIDIA GPU, bf16, gate first, no biases, rows of whole 16 bytes."""
    gate_up, down, *biases = stacks
    plain = not variant.interleaved and biases[0] is None and biases[1] is None
    if x.dtype != torch.bfloat16 or not plain or not has_grouped_mm(x.device):
        return False
    return whole_16_bytes(gate_up, down)


def up(
    x: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    projected = F.grouped_mm(gathered(x, to), inwards(stacks[0], variant), offs=to.ends)
    return launch.gate(projected, to, variant.gate), projected if keep else None


def down(product: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant) -> torch.Tensor:
    return F.grouped_mm(product, inwards(stacks[1], variant), offs=to.ends)


def gathered(tokens: torch.Tensor, to: Route) -> torch.Tensor:
    """Each slot's token's row."""
    return torch.index_select(tokens, 0, to.tokens)


def gate_backward(
    grad: torch.Tensor,
    to: Route,
    stacks: Stacks,
    variant: MoeExpertsVariant,
    weights: torch.Tensor,
    projected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    back = F.grouped_mm(grad, inwards(stacks[1], variant).transpose(1, 2), offs=to.ends)
    return launch.gate_backward_rows(back, to, weights, projected, variant.gate)


def input_gradient(dprojected: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant) -> torch.Tensor:
    return F.grouped_mm(dprojected, inwards(stacks[0], variant).transpose(1, 2), offs=to.ends)


def first_gradient(
    dprojected: torch.Tensor, x: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return stack_gradient(dprojected, gathered(x, to), to, variant), None


def second_gradient(
    grad: torch.Tensor, product: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant
) -> torch.Tensor:
    return stack_gradient(grad, product, to, variant)
