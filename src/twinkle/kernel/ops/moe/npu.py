"""The ``npu`` backend of ``moe_experts`` and ``moe_block``: torch_npu's token permutation and grouped matrix product.

Rows are sorted by expert, multiplied with each expert's weights in one call, and put back weighted, each step with its
published gradient. The product wants weights of ``[experts, inputs, outputs]``, contiguous: stacks that lie the other
way round, as most models', are transposed into a copy at each forward. The copy is never kept, since adapters compute
the stacks anew; the gradients read and write the stacks as they lie.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.glu.npu import SwiGLU
from twinkle.kernel.ops.moe.block_reference import nothing_to_fuse
from twinkle.kernel.ops.moe.calls import call_reason as experts_call_reason
from twinkle.kernel.ops.moe.experts_reference import (
    Gate,
    MoeExpertsVariant,
    Stacks,
    other_implementation,
    stacks_of,
)
from twinkle.kernel.ops.npu_support import call_reason, device_reason, npu_function
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

available = functools.partial(
    npu_support.available,
    {
        "npu_moe_token_permute": (),
        "npu_moe_token_permute_grad": (),
        "npu_moe_token_unpermute": ("probs",),
        "npu_moe_token_unpermute_grad": ("probs",),
        "npu_grouped_matmul": ("group_list", "group_type", "group_list_type", "split_item"),
        "npu_swiglu": ("dim",),
        "npu_swiglu_backward": ("dim",),
    },
)

available_block = functools.partial(npu_support.available, {})

MOST_CHOICES = 16777215
MOST_PER_TOKEN = 512
WIDEST = 65536
"""Choices of a call, experts of a token and columns of a matrix are fewer (a token's experts: at most) than these."""


# --- the steps, each with its gradient --------------------------------------------------------------------------------


class _Permute(torch.autograd.Function):
    """Tokens ``[T, H]`` and choices ``[T, K]`` to rows ``[T K, H]`` sorted by expert, and where each choice went."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, places = npu_function("npu_moe_token_permute")(x, index)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, index, places)
        return rows, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        x, index, places = saved_tensors(ctx, "moe_experts by npu")
        return npu_function("npu_moe_token_permute_grad")(x, grad.contiguous(), index, places), None


class _Unpermute(torch.autograd.Function):
    """Rows ``[T K, H]`` back to tokens ``[T, H]``, weighted by ``[T, K]``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, places, weights)
        return npu_function("npu_moe_token_unpermute")(rows, places, probs=weights)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        rows, places, weights = saved_tensors(ctx, "moe_experts by npu")
        gradient = npu_function("npu_moe_token_unpermute_grad")
        drows, dweights = gradient(rows, grad.contiguous(), places, probs=weights)
        return drows, None, dweights


class _GroupedProduct(torch.autograd.Function):
    """Each expert's rows of ``[S, inputs]`` times its weights: ``[S, outputs]``.

    ``stack`` is ``[E, outputs, inputs]``, or with ``transposed`` ``[E, inputs, outputs]``; ``counts [E]`` int64 says
    how many rows an expert has.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, stack, counts)
        ctx.transposed = transposed
        return _of_rows(rows, stack if transposed else stack.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, stack, counts = saved_tensors(ctx, "moe_experts by npu")
        grad = grad.contiguous()
        drows = dstack = None
        if ctx.needs_input_grad[0]:
            drows = _of_rows(grad, stack.transpose(1, 2) if ctx.transposed else stack, counts)
        if ctx.needs_input_grad[1]:  # adapters leave the stacks frozen
            a, b = (rows, grad) if ctx.transposed else (grad, rows)
            dstack = _grouped([a.t()], [b], counts, group_type=2, split_item=3)
            # That the product of no rows is written at all isn't published.
            dstack = dstack.masked_fill_((counts == 0)[:, None, None], 0)
        return drows, dstack, None, None


def _of_rows(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return _grouped([rows], [weights.contiguous()], counts, group_type=0, split_item=2)


def _grouped(a: list[torch.Tensor], b: list[torch.Tensor], counts: torch.Tensor, **how: int) -> torch.Tensor:
    """One call for all experts; type 1 of a list of groups says how many rows each has."""
    return npu_function("npu_grouped_matmul")(a, b, group_list=counts, group_list_type=1, **how)[0]  # type: ignore[no-any-return]


# --- the experts ------------------------------------------------------------------------------------------------------


def grouped_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks, variant: MoeExpertsVariant
) -> torch.Tensor:
    """Every token through its chosen experts, see :func:`~twinkle.kernel.ops.moe.experts_reference.moe_experts`."""
    gate_up, down, *_ = stacks
    experts = gate_up.shape[0]
    # Under transformers' expert parallelism a choice may name no expert (an index of num_experts). It becomes expert
    # 0's with weight 0: right, at the cost of its rows, where leaving it out would make the CPU wait for the NPU.
    nobody = (index < 0) | (index >= experts)
    index, weights = index.masked_fill(nobody, 0), weights.masked_fill(nobody, 0)
    rows, places = _Permute.apply(x.contiguous(), index.contiguous())
    counts = torch.bincount(index.flatten(), minlength=experts)
    projected = _GroupedProduct.apply(rows, gate_up, counts, variant.transposed)
    product = _gated(projected, variant).contiguous()
    results = _GroupedProduct.apply(product, down, counts, variant.transposed)
    return _Unpermute.apply(results, places, weights.to(x.dtype).contiguous())  # type: ignore[no-any-return]


def _gated(projected: torch.Tensor, variant: MoeExpertsVariant) -> torch.Tensor:
    """The gated product: torch_npu's for SiLU, gate first; any other as it is written down."""
    if variant.interleaved:
        return variant.gate(projected[:, ::2], projected[:, 1::2])
    if variant.gate == Gate("silu"):
        return SwiGLU.apply(projected)  # type: ignore[no-any-return]
    return variant.gate(*projected.chunk(2, dim=-1))


def accepts(site: Site) -> Reason | None:
    """Experts without biases, on an NPU."""
    if site.variant.bias:
        return Reason("variant", "the experts have biases, which torch_npu's grouped product takes in inference only")
    return device_reason(site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeExpertsVariant = site.variant

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        return grouped_experts(hidden_states, top_k_index, top_k_weights, stacks_of(self, variant), variant)

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        reason = other_implementation(self, variant)
        return reason or _refusal(hidden_states, top_k_index, top_k_weights, stacks_of(self, variant))

    return layer("NpuMoeExperts", forward, accepts_call)


def _refusal(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks: Stacks) -> str | None:
    """Why a call can't be served."""
    reason = call_reason(x, weights, *stacks, one_dtype=False) or experts_call_reason(x, index, weights, stacks)
    if reason is not None:
        return reason
    if x.dtype != torch.bfloat16:
        return "torch_npu permutes tokens of bf16 only"
    if index.dtype not in (torch.int64, torch.int32):
        return "the choices are neither int64 nor int32"
    if index.numel() >= MOST_CHOICES or index.shape[1] > MOST_PER_TOKEN:
        return "more choices than torch_npu permutes"
    if len(stacks[0]) < 2:
        return "one expert needs no grouped product"
    if max(*stacks[0].shape[1:], *stacks[1].shape[1:]) >= WIDEST:
        return "matrices of 65536 columns or more"
    return None


# --- the block --------------------------------------------------------------------------------------------------------


def accepts_block(site: Site) -> Reason | None:
    """Blocks with a shared expert, on an NPU."""
    return nothing_to_fuse(site.variant) or device_reason(site)


def load_block(target: Any, site: Site) -> type[nn.Module]:
    """The layer class of a block: its children are called, and torch_npu's ``addcmul`` joins them in one pass.

    The router has to be called as a module, since adapters and the auxiliary loss hang on it, so torch_npu's fused
    choice of experts can't take its place.
    """

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(tokens)
        routed = self.experts(tokens, index, weights)
        share, shared = torch.sigmoid(self.shared_expert_gate(tokens)), self.shared_expert(tokens)
        return torch.addcmul(routed, share, shared).reshape(hidden_states.shape)

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        return call_reason(hidden_states)

    return layer("NpuMoeBlock", forward, accepts_call)
