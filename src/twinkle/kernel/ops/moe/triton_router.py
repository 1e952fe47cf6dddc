"""The ``triton`` backend of ``moe_router``: softmax, choice and normalisation in one launch, their gradient in another.

PyTorch's operators take six launches for them and as many for the gradient, which a block of experts waits for: its
matrix products can't begin before it is known who goes where.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.moe.router_reference import MoeRouterVariant, Routed, scores_of
from twinkle.kernel.ops.triton_support import call_reason, device_reason
from twinkle.memory import Memory
from twinkle.reasons import Reason
from twinkle.triton_programs import Launch, Program

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""A program holds all logits of a token, and takes the largest so often."""

CELLS = 2048
"""Logits of a program."""

_LOWEST = tl.constexpr(-3.4e38)
"""Below all logits but -inf; chosen ones and padding go to -inf, so that nothing is chosen twice."""


@triton.jit
def _logits(logits_ptr, tokens, experts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The program's tokens, the experts, which of them are, which cells are, and logits ``[BLOCK, WIDTH]`` in fp32."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDTH)
    real = (expert < experts)[None, :]
    inside = (token < tokens)[:, None] & real
    cells = token[:, None] * experts + expert[None, :]
    logits = tl.where(real, tl.load(logits_ptr + cells, mask=inside, other=0.0).to(tl.float32), float("-inf"))
    return token, expert, real, inside, cells, logits


@triton.jit
def _softmax(logits, real):
    """Shares of each token's experts."""
    exponentials = tl.where(real, tl.exp(logits - tl.max(logits, axis=1)[:, None]), 0.0)
    return exponentials / tl.sum(exponentials, axis=1)[:, None]


@triton.jit
def choose_kernel(
    logits_ptr, scores_ptr, index_ptr, tokens, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``scores [T, K]`` and ``index [T, K]``. Of equal logits the first is chosen; a NaN makes all scores NaN."""
    token, expert, real, _inside, _cells, logits = _logits(logits_ptr, tokens, experts, WIDTH, BLOCK)
    shares = _softmax(logits, real)
    left = tl.where(real, tl.where(logits > _LOWEST, logits, _LOWEST), float("-inf"))
    choice = tl.arange(0, CHOICES)
    scores = tl.zeros((BLOCK, CHOICES), tl.float32)
    index = tl.zeros((BLOCK, CHOICES), tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, axis=1), experts - 1)
        taken = expert[None, :] == best[:, None]
        score = tl.sum(tl.where(taken, shares, 0.0), axis=1)
        scores = tl.where(choice[None, :] == k, score[:, None], scores)
        index = tl.where(choice[None, :] == k, best[:, None].to(tl.int64), index)
        left = tl.where(taken, float("-inf"), left)
    if NORMALIZED:
        scores = scores / tl.sum(scores, axis=1)[:, None]
    cells = token[:, None] * TOP_K + choice[None, :]
    inside = (token < tokens)[:, None] & (choice < TOP_K)[None, :]
    tl.store(scores_ptr + cells, scores.to(scores_ptr.dtype.element_ty), mask=inside)
    tl.store(index_ptr + cells, index, mask=inside)


@triton.jit
def choose_backward_kernel(
    grad_ptr, logits_ptr, index_ptr, dlogits_ptr, tokens, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A softmax's gradient: over the chosen experts where scores are normalized, else over all."""
    token, expert, real, inside, cells, logits = _logits(logits_ptr, tokens, experts, WIDTH, BLOCK)
    shares = _softmax(logits, real)
    upstream = tl.zeros((BLOCK, WIDTH), tl.float32)
    chosen = tl.zeros((BLOCK, WIDTH), tl.int1)
    for k in tl.static_range(TOP_K):
        at = token * TOP_K + k
        taken = expert[None, :] == tl.load(index_ptr + at, mask=token < tokens, other=0)[:, None]
        grad = tl.load(grad_ptr + at, mask=token < tokens, other=0.0).to(tl.float32)
        upstream = tl.where(taken, grad[:, None], upstream)
        chosen = chosen | taken
    if NORMALIZED:
        shares = tl.where(chosen, shares, 0.0)
        shares = shares / tl.sum(shares, axis=1)[:, None]
    dlogits = shares * (upstream - tl.sum(shares * upstream, axis=1)[:, None])
    tl.store(dlogits_ptr + cells, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


_programs: Memory[tuple[Program, Program]] = Memory()


def _programs_for(logits: torch.Tensor, top_k: int, variant: MoeRouterVariant) -> tuple[Program, Program]:
    """Forward and backward."""
    key = logits.shape, logits.dtype, logits.device, top_k, variant
    return _programs.get(key) or _programs.add(
        key, _launched(logits.shape[0], logits.shape[1], top_k, variant.normalized)
    )


def _launched(tokens: int, experts: int, top_k: int, normalized: bool) -> tuple[Program, Program]:
    width = triton.next_power_of_2(experts)
    block = max(1, CELLS // width)
    grid, sizes = (triton.cdiv(tokens, block),), (tokens, experts)
    constants = {"TOP_K": top_k, "NORMALIZED": normalized, "WIDTH": width}
    choices = {"CHOICES": triton.next_power_of_2(top_k)}
    return (
        Program(choose_kernel, Launch(grid, sizes, {**constants, **choices, "BLOCK": block}, 4)),
        Program(choose_backward_kernel, Launch(grid, sizes, {**constants, "BLOCK": block}, 4)),
    )


def _choose(logits: torch.Tensor, top_k: int, variant: MoeRouterVariant) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and index of contiguous logits."""
    shape = logits.shape[0], top_k
    scores = logits.new_empty(shape, dtype=torch.float32 if variant.wide else logits.dtype)
    index = logits.new_empty(shape, dtype=torch.int64)
    _programs_for(logits, top_k, variant)[0](logits, scores, index)
    return scores, index


class _Choice(torch.autograd.Function):
    """Of logits ``[T, E]`` the scores and the index."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, variant: MoeRouterVariant
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, index = _choose(logits, top_k, variant)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        ctx.variant = variant
        return scores, index

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, None, None]:
        logits, index = saved_tensors(ctx, "moe_router by triton")
        variant: MoeRouterVariant = ctx.variant
        if wants_formula(grad):
            formula = functools.partial(scores_of, index=index, variant=variant)
            return gradients_by_formula(formula, (logits,), (True,), grad.float())[0], None, None
        dlogits = torch.empty_like(logits)
        _programs_for(logits, index.shape[1], variant)[1](grad.contiguous(), logits, index, dlogits)
        return dlogits, None, None


def accepts(site: Site) -> Reason | None:
    """Every variant, on a device that Triton runs on."""
    return device_reason(site)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeRouterVariant = site.variant

    def forward(self: Any, hidden_states: torch.Tensor) -> Routed:
        weight = self.weight
        logits = nn.functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), weight).contiguous()
        if torch.is_grad_enabled():
            return (logits, *_Choice.apply(logits, self.top_k, variant))
        return (logits, *_choose(logits, self.top_k, variant))

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        if is_compiling():
            return "inside a compiler, which fuses it itself"
        weight = self.weight
        if weight.dim() != 2 or not 0 < self.top_k <= min(weight.shape[0], MOST_CHOSEN):
            return f"more experts are chosen than there are, or than {MOST_CHOSEN}"
        if weight.shape[0] > MOST_EXPERTS:
            return f"more than {MOST_EXPERTS} experts"
        if getattr(self, "norm_topk_prob", variant.normalized) != variant.normalized:
            return "since the kernel was installed, norm_topk_prob has been changed"
        return call_reason(hidden_states, weight)

    return layer("TritonMoeRouter", forward, accepts_call)
