"""The matrix products of a mixture of experts by our own Triton programs: every layout, bias and dtype.

The rows of the tokens are gathered while they are read. The functions here and in
:mod:`twinkle.kernel.ops.moe.torch_products` are the same; rows are sorted slots, ``S`` of them.
"""

from __future__ import annotations

import torch

from twinkle.kernel.ops.moe import triton_launch as launch
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, Stacks
from twinkle.kernel.ops.moe.routing import Route


def up(
    x: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated products ``[S, I]`` of ``x [T, H]``; with ``keep`` both projections ``[S, 2 I]``, gate first."""
    gate_up, _, bias, _ = stacks
    width = gate_up.shape[2 if variant.transposed else 1] // 2
    at, bias_at = _first(gate_up, variant), _of_bias(bias, variant)
    return launch.up(x, to, gate_up, at, bias, bias_at, variant.gate, width, keep)


def down(product: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant) -> torch.Tensor:
    """``[S, H]``, the experts' results before the router's weights."""
    _, weight, _, bias = stacks
    width = weight.shape[2 if variant.transposed else 1]
    return launch.rows(product, to, weight, launch.down_projection(weight, variant.transposed), width, bias)


def gathered(tokens: torch.Tensor, to: Route) -> torch.Tensor:
    """What the functions below want of a gradient ``[T, H]``: here as it is; PyTorch's products need ``[S, H]``."""
    return tokens


def gate_backward(
    grad: torch.Tensor,
    to: Route,
    stacks: Stacks,
    variant: MoeExpertsVariant,
    weights: torch.Tensor,
    projected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the output's gradient, :func:`gathered`, back to the projections.

    Returns:
        the projections' gradient ``[S, 2 I]``, the gated products times the router's weights ``[S, I]``, and the
        gradients of the router's weights ``[S]``, without the bias's share.
    """
    at = launch.down_projection(stacks[1], variant.transposed)
    return launch.gate_backward(grad, to, stacks[1], at, weights, projected, variant.gate)


def input_gradient(dprojected: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant) -> torch.Tensor:
    """``[S, H]``, the gradients of the rows that went into the experts."""
    at = _first(stacks[0], variant)
    width = stacks[0].shape[1 if variant.transposed else 2]
    backwards = at._replace(column=at.row, row=at.column)
    return launch.rows(dprojected, to, stacks[0], backwards, width, parts=2)


def first_gradient(
    dprojected: torch.Tensor, x: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of the first stack and its bias."""
    gate_up, bias = torch.empty_like(stacks[0]), None if stacks[2] is None else torch.empty_like(stacks[2])
    at, bias_at = _first(gate_up, variant), _of_bias(bias, variant)
    launch.weight_gradient(dprojected, x, to, gate_up, at, bias, bias_at, b_by_token=True)
    return gate_up, bias


def second_gradient(
    grad: torch.Tensor, product: torch.Tensor, to: Route, stacks: Stacks, variant: MoeExpertsVariant
) -> torch.Tensor:
    """The gradient of the second stack, from the output's, :func:`gathered`, and weighted gated products."""
    down = torch.empty_like(stacks[1])
    at = launch.down_projection(down, variant.transposed)
    launch.weight_gradient(grad, product, to, down, at, a_by_token=True)
    return down


def _first(gate_up: torch.Tensor, variant: MoeExpertsVariant) -> launch.Projection:
    return launch.gate_up_projection(gate_up, variant.transposed, variant.interleaved)


def _of_bias(bias: torch.Tensor | None, variant: MoeExpertsVariant) -> launch.Projection | None:
    """Of ``[E, 2 I]``, as the first projection's outputs lie."""
    if bias is None:
        return None
    expert, column = bias.stride()
    if variant.interleaved:
        return launch.Projection(expert, 2 * column, 0, column)
    return launch.Projection(expert, column, 0, bias.shape[1] // 2 * column)
