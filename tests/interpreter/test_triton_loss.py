"""The Triton program of the tokens' losses: every option, rows of several blocks, values at the edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.triton_device import DEVICE, DTYPES, ON_GPU, by_device, examples
from twinkle.kernel.verify import allowed_error_used
from twinkle.loss import triton_scaling, triton_token_losses
from twinkle.loss.scaling import scaled_in_place
from twinkle.loss.token_losses import Recipe, by_formula

TOKENS = by_device(12, 200)
CLASSES = by_device([1, 5, 64, 100], [1, 100, 8192, 50257])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_token_losses, "BLOCK", by_device(32, 8192))


def given_case(classes: int, dtype: torch.dtype, seed: int, weighted: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(TOKENS, classes, generator=generator)).to(DEVICE, dtype)
    target = torch.randint(classes, (TOKENS,), generator=generator).to(DEVICE)
    target[1] = -100
    weight = torch.rand(classes, generator=generator).add(0.1).to(DEVICE) if weighted else None
    return logits, target, weight, torch.rand(TOKENS, generator=generator).to(DEVICE)


def run(function: Any, case: tuple[Any, ...], recipe: Recipe, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and the gradient that is written over a copy of the logits."""
    logits, target, weight, upstream = case
    wide = torch.promote_types(dtype, torch.float32)
    logits = logits.to(dtype, copy=True)
    return function(logits, target, None if weight is None else weight.to(wide), recipe, upstream.to(wide)), logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_losses_and_gradients_are_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    recipe = Recipe(
        label_smoothing=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        z_loss=data.draw(st.sampled_from([0.0, 1e-3])),
        scale=data.draw(st.sampled_from([1.0, 0.25, 2.0])),
        softcap=data.draw(st.sampled_from([None, 3.0, 30.0])),
    )
    case = given_case(
        data.draw(st.sampled_from(CLASSES)), dtype, data.draw(st.integers(0, 9)), data.draw(st.booleans())
    )
    ours, theirs = (run(f, case, recipe, dtype) for f in (triton_token_losses.token_losses, by_formula))
    exact = run(by_formula, case, recipe, torch.float64)
    used = [allowed_error_used(*three) for three in zip(ours, theirs, exact, strict=True)]
    assert max(used) <= 1, (recipe, used)


def test_without_an_upstream_the_logits_stay() -> None:
    logits, target, weight, _ = given_case(100, torch.float32, 0, True)
    before = logits.clone()
    losses = triton_token_losses.token_losses(logits, target, weight, Recipe(), None)
    torch.testing.assert_close(losses, by_formula(before, target, weight, Recipe(), None))
    assert torch.equal(logits, before)


@pytest.mark.skipif(ON_GPU, reason="there libdevice is one")
def test_a_soft_cap_where_libdevice_is_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter has it when no test has mended it; over small numbers, large ones, and where the ways meet."""
    monkeypatch.setattr(triton_token_losses.libdevice, "tanh", lambda x: None)
    near = torch.linspace(0.099, 0.101, 9)
    row = torch.cat([torch.logspace(-30, 2, 60), near, -near, torch.tensor([0.0, -1e-20, 1e30, -1e30])])
    case = row[None].to(DEVICE), torch.tensor([3]).to(DEVICE), None, torch.ones(1).to(DEVICE)
    ours, theirs = (
        run(function, case, Recipe(softcap=1.0), torch.float32)
        for function in (triton_token_losses.token_losses, by_formula)
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_values_at_the_edge() -> None:
    """Whole blocks of -inf, as masks of unused classes leave them; large values; a class that there isn't."""
    logits, target, _, upstream = given_case(100, torch.float32, 0, False)
    logits[:, :40] = float("-inf")
    logits[0, 60] = 1e4
    target = target.where(target < 0, target.clamp(min=40))
    target[0], target[2] = 60, 70
    case = logits, target, None, upstream
    ours, theirs = (
        run(function, case, Recipe(), torch.float32) for function in (triton_token_losses.token_losses, by_formula)
    )
    torch.testing.assert_close(ours, theirs)
    assert ours[0].isfinite().all() and not ours[1][:, :40].any() and not ours[1][1].any()
    target[0] = 100
    assert triton_token_losses.token_losses(logits, target, None, Recipe(), None).isnan().tolist() == (
        [True] + [False] * (TOKENS - 1)
    )


def test_one_number_for_all_tokens_is_read_in_place() -> None:
    """As the loss passes what a token is worth: expanded, not copied."""
    logits, target, _, _ = given_case(64, torch.float32, 3, False)
    results = []
    for upstream in (torch.tensor(0.25, device=DEVICE).expand(TOKENS), torch.full((TOKENS,), 0.25, device=DEVICE)):
        written = logits.clone()
        triton_token_losses.token_losses(written, target, None, Recipe(), upstream)
        results.append(written)
    assert torch.equal(*results) and results[0].any()


def test_no_tokens() -> None:
    losses = triton_token_losses.token_losses(
        torch.empty(0, 8, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE), None, Recipe(), None
    )
    assert losses.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_in_place_is_pytorchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scaling, "BLOCK", by_device(2**16, 4096))
    factor = torch.tensor(0.3, device=DEVICE)
    for size in (0, 3, 2**20 + 5, 2**21 + 3):
        values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        expected = (values * factor).to(dtype)
        assert torch.equal(scaled_in_place(values.clone(), factor, dtype, "triton"), expected)
    same = values.to(dtype)
    assert torch.equal(scaled_in_place(same.clone(), factor, dtype, "triton"), (same.float() * factor).to(dtype))
