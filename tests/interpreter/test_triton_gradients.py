"""What the gradients of Triton's programs read: what hooks on saved tensors make of those, and negated gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.triton_device import DEVICE, laid_out, launched, negated  # noqa: F401
from twinkle.kernel.ops.fused_norms import add_triton, qk_triton
from twinkle.kernel.ops.glu import triton as glu
from twinkle.kernel.ops.moe import triton as experts
from twinkle.kernel.ops.moe import triton_block, triton_router
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant
from twinkle.kernel.ops.moe.router_reference import MoeRouterVariant
from twinkle.kernel.ops.rms_norm import triton as rms_norm
from twinkle.kernel.ops.rotary import triton as rotary_kernels
from twinkle.loss import linear_cross_entropy


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for three tokens, side by side in one tensor."""
    both = laid_out((1, 3, 40), torch.float32, "contiguous", seed=7)
    return both[..., :16], both[..., 20:36]


def _normed_and_turned(x: torch.Tensor, weight: torch.Tensor) -> Any:
    q, k = x[..., :16].transpose(1, 2), x[..., 20:36].transpose(1, 2)
    kind = {"q_eps": 1e-6, "k_eps": 1e-6, "offset": 0.0, "cast": "before", "heads_at": 1}
    return qk_triton.qk_norm_rotary(q, k, weight, weight, *_tables(), **kind)


def _added_and_normed(x: torch.Tensor, weight: torch.Tensor) -> Any:
    residual, summand = x.view(2, -1, 16)
    return add_triton.add_rms_norm(residual, summand, weight, eps=1e-6, offset=0.0, cast="before")


HOOKED: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, w: rms_norm.rms_norm(x[..., 8:24], w, None, 1e-6, 0.0, "before"), ((4, 32), (16,))),
    "add_rms_norm": (lambda x, w: torch.cat(_added_and_normed(x, w), -1), ((4, 32), (16,))),
    "glu": (lambda x: glu.glu(*x.chunk(2, -1), "silu"), ((4, 32),)),
    "fused_glu": (lambda x: glu.fused_glu(x[:, :32], "silu"), ((4, 48),)),
    "qk_norm_rotary": (lambda x, w: torch.cat(_normed_and_turned(x, w), -1), ((1, 3, 4, 64), (16,))),
    "rotary": (lambda x: rotary_kernels._Rotary.apply(x, None, *_tables(), 0, 1), ((1, 4, 3, 16),)),
}
"""Of views, which a hook may give back dense."""


def _leaves(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    return [laid_out(shape, torch.float32, "contiguous", seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def _seed(out: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["hooks first", "hooks last"])
@pytest.mark.parametrize("name", HOOKED)
def test_what_hooks_on_saved_tensors_lay_out_anew(name: str, order: tuple[bool, ...]) -> None:
    """As offloading them to a CPU does; neither gradient is read by the other's strides."""
    function, shapes = HOOKED[name]
    leaves = _leaves(shapes)
    hooks = (lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)
    found = []
    for hooked in order:
        with torch.autograd.graph.saved_tensors_hooks(*hooks) if hooked else contextlib.nullcontext():
            out = function(*leaves)
        found.append(torch.autograd.grad((out * _seed(out)).sum(), leaves))
    torch.testing.assert_close(found[0], found[1])


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    lying_alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16, device=tensor.device)
    return lying_alike.copy_(tensor)


@pytest.mark.parametrize("name", HOOKED)
def test_what_hooks_on_saved_tensors_keep_in_fewer_bits(name: str, launched: Any) -> None:  # noqa: F811
    """A program is compiled for the dtypes that it meets first."""
    function, shapes = HOOKED[name]
    leaves = _leaves(shapes)
    kept: tuple[Callable[[torch.Tensor], bool], ...] = (lambda t: False, lambda t: True, lambda t: t.dim() > 1)
    found = []
    for narrowed in kept:
        hooks = (lambda t, narrowed=narrowed: _narrow(t) if narrowed(t) else t, lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = function(*leaves)
        found.append(torch.autograd.grad(out, leaves, _seed(out)))
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=2e-2, atol=2e-2)
    met = {(program, tuple(t.dtype for t in tensors if t is not None)) for program, tensors in launched}
    assert len(met) == len({program for program, _ in met})


_CHOSEN = torch.tensor([[0, 2], [1, 0], [2, 1]], device=DEVICE)


def _expertly(x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    stacks = gate_up, down, None, None
    return experts._experts(x, weights, *stacks, _CHOSEN, MoeExpertsVariant(Gate("silu")))


def _chosen(logits: torch.Tensor) -> torch.Tensor:
    scores, _ = triton_router._Choice.apply(logits, 2, MoeRouterVariant(normalized=True, wide=False))
    return scores


def _loss(x: torch.Tensor, weight: torch.Tensor, reduction: Any) -> torch.Tensor:
    return linear_cross_entropy(
        x, weight, torch.tensor([0, 3, 1], device=DEVICE), reduction=reduction, backend="triton"
    )


FUNCTIONS = HOOKED | {
    "moe_experts": (_expertly, ((3, 16), (3, 2), (3, 48, 16), (3, 16, 24))),
    "moe_router": (_chosen, ((3, 8),)),
    "moe_block": (triton_block.join, ((3, 16), (3, 1), (3, 16))),
    "linear_cross_entropy": (functools.partial(_loss, reduction="mean"), ((3, 16), (5, 16))),
    "linear_cross_entropy of each": (functools.partial(_loss, reduction="none"), ((3, 16), (5, 16))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_negated_gradient(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    leaves = _leaves(shapes)
    out = function(*leaves)
    seed = _seed(out)
    expected = torch.autograd.grad(out, leaves, seed, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, negated(seed)), expected)
