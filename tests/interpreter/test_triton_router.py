"""The router of a mixture of experts by our Triton programs: choices, scores and their gradients; whole models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import (
    DEVICE,
    DTYPES,
    assert_judged,
    by_device,
    examples,
    second_derivatives,
    skip_without_gradients,
)
from twinkle import presets
from twinkle.commands.comparison import judge
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.moe.router_reference import MoeRouterVariant, moe_router, scores_of
from twinkle.kernel.ops.moe.triton_router import MOST_CHOSEN, _Choice
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import unkernelize

pytest.importorskip("transformers")

variants = st.builds(MoeRouterVariant, st.booleans(), st.booleans())
SIZES = by_device(
    [(1, 2, 1), (13, 8, 2), (40, 24, 5), (7, 60, 4), (3, 128, 8), (2, 300, 3), (9, 4, 4)],
    [(1, 2, 1), (1000, 8, 2), (333, 60, 4), (8192, 128, 8), (700, 384, 6), (50, 1000, 32), (9, 4, 4)],
)
NORMALIZED = MoeRouterVariant(normalized=True, wide=False)

ROUTERS = {
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_vl_moe": "Qwen3VLMoeTextTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "qwen3_5_moe": "Qwen3_5MoeTopKRouter",
    "mixtral": "MixtralTopKRouter",
}
"""Families whose router is the op's -> their class."""


def logits_of(tokens: int, experts: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> torch.Tensor:
    """No two of a token are equal in that dtype: multiples of a number that it can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return ((ranks - experts / 2) * spread / 32).to(DEVICE, dtype)


def chosen(logits: torch.Tensor, top_k: int, variant: MoeRouterVariant) -> tuple[torch.Tensor, torch.Tensor]:
    return _Choice.apply(logits, top_k, variant)


@examples
@given(
    variant=variants,
    sizes=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    spread=st.sampled_from((0.01, 1.0, 8.0)),
)
def test_the_largest_are_chosen_and_scores_and_gradients_are_within_the_judgement(
    variant: MoeRouterVariant, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int, spread: float
) -> None:
    tokens, experts, top_k = sizes
    logits = logits_of(tokens, experts, dtype, seed, spread)
    scores, index = chosen(logits, top_k, variant)
    assert index.dtype == torch.int64
    assert torch.equal(index, logits.topk(top_k).indices)
    assert scores.dtype == (torch.float32 if variant.wide else dtype)

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return chosen(logits, top_k, variant)[0]

    def formula(logits: torch.Tensor) -> torch.Tensor:
        result = scores_of(logits, index, variant)
        return result if variant.wide else result.to(logits.dtype)

    assert_judged(ours, formula, formula, lambda _: {"logits": logits})


@pytest.mark.parametrize("variant", [NORMALIZED, MoeRouterVariant(normalized=False, wide=True)])
def test_a_gradient_of_the_gradient(variant: MoeRouterVariant) -> None:
    logits = logits_of(5, 8, torch.float32, 3)
    index = logits.topk(3).indices
    found = second_derivatives(lambda logits: chosen(logits, 3, variant)[0], {"logits": logits}, ["logits"])
    expected = second_derivatives(lambda logits: scores_of(logits, index, variant), {"logits": logits}, ["logits"])
    torch.testing.assert_close(found, expected)


def test_equal_logits_are_chosen_in_order_and_each_once() -> None:
    index = chosen(torch.zeros(3, 5, device=DEVICE), 4, NORMALIZED)[1]
    assert index.tolist() == [[0, 1, 2, 3]] * 3


def test_experts_that_are_ruled_out_are_chosen_last() -> None:
    low = float("-inf")
    logits = torch.tensor([[low, 1.0, low, 2.0, low], [low] * 4 + [0.0]], device=DEVICE)
    scores, index = chosen(logits, 4, NORMALIZED)
    assert index.tolist() == [[3, 1, 0, 2], [4, 0, 1, 2]]
    assert scores[:, 2:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert scores.sum(-1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_the_scores_as_in_pytorchs(bad: float) -> None:
    logits = torch.randn(3, 6, device=DEVICE)
    logits[1, 2] = bad
    scores, index = chosen(logits, 2, NORMALIZED)
    assert scores.isnan().any(-1).tolist() == [False, True, False]
    assert ((index >= 0) & (index < 6)).all()
    assert (index[:, 0] != index[:, 1]).all()


def installed(model: Any) -> Any:
    """The model with the kernel, verified, as its router's class."""
    family = type(model).__module__.split(".")[2]
    name = f"{type(model).__module__}.{ROUTERS[family]}.forward"
    kernelize(model, {name: KernelChoice("moe_router", ("triton",))}, strict=True, verify=True)
    (row,) = report(model).rows
    assert (short(row.target), row.state, row.verified) == (f"{family}.{ROUTERS[family]}.forward", "installed", True)
    return model


def router_of(model: Any) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("mlp.gate"))


@pytest.mark.parametrize("family", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_familys_router(family: str, dtype: torch.dtype) -> None:
    """Verified one by one, and in the model: outputs and the gradient of every parameter."""
    skip_without_gradients(family)
    original = presets.build(family, dtype=dtype).to(DEVICE)
    model = installed(copy.deepcopy(original))
    used = judge(original, model)
    (row,) = report(model).rows
    assert row.calls > 0 and row.fallbacks == {}
    assert used and max(used.values()) <= 1, {key: value for key, value in used.items() if value > 1}
    unkernelize(model)


def test_the_routers_logits_are_there_for_who_asks() -> None:
    """Of a loss that balances the experts: its gradient comes by the logits, beside that of the scores."""
    model = presets.build("qwen3_moe").to(DEVICE)
    labels = torch.arange(12, device=DEVICE).view(2, 6)

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        out = model(input_ids=labels, labels=labels, output_router_logits=True)
        out.loss.backward()
        return out.aux_loss.detach(), [p.grad.clone() for n, p in model.named_parameters() if n.endswith("gate.weight")]

    expected = step()
    assert expected[1]
    installed(model)
    torch.testing.assert_close(step(), expected)
    assert report(model).rows[0].calls > 0
    unkernelize(model)


def test_calls_that_are_the_originals() -> None:
    model = installed(presets.build("qwen3_moe").to(DEVICE))
    router = router_of(model)
    x = torch.randn(4, router.weight.shape[1], device=DEVICE)
    assert router(x[:0])[1].shape == (0, router.top_k)
    router.top_k = router.weight.shape[0] + 1
    with pytest.raises(RuntimeError):  # PyTorch's own
        router(x)
    (row,) = report(model).rows
    assert set(row.fallbacks) == {"an empty tensor", f"more experts are chosen than there are, or than {MOST_CHOSEN}"}
    unkernelize(model)


def test_scores_are_normalized_as_the_router_says_now() -> None:
    model = installed(presets.build("qwen3_moe").to(DEVICE))
    router = router_of(model)
    x = torch.randn(4, router.weight.shape[1], device=DEVICE)
    router.norm_topk_prob = not router.norm_topk_prob
    changed = router(x)[1]
    (row,) = report(model).rows
    assert row.fallbacks == {"since the kernel was installed, norm_topk_prob has been changed": 1}
    unkernelize(model)
    assert torch.equal(router(x)[1], changed)


def test_the_reference_is_what_transformers_computes() -> None:
    router = router_of(presets.build("qwen3_moe").to(DEVICE))
    x = torch.randn(2, 3, router.weight.shape[1], device=DEVICE)
    expected = router(x)
    variant = MoeRouterVariant(normalized=router.norm_topk_prob, wide=False)
    torch.testing.assert_close(moe_router(x, router.weight, router.top_k, variant), expected)
