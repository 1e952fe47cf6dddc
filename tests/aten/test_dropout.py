"""``dropout``: its random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ops.dropout import SPEC
from tests.aten.conftest import DEVICE, SIMULATED, TRITON
from twinkle.aten import Profile

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def registered(chip: Profile):
    with SPEC.register_a1(platform=chip.platform) as registration:
        yield registration


def drop(x: torch.Tensor, seed: int, p: float = 0.5) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.nn.functional.dropout(x, p)


def test_the_seed_decides() -> None:
    x = torch.ones(40, 50, device=DEVICE)
    first = drop(x, 1)
    assert torch.equal(first, drop(x, 1))
    assert not torch.equal(first, drop(x, 2))
    torch.manual_seed(1)
    once, again = torch.nn.functional.dropout(x), torch.nn.functional.dropout(x)
    assert torch.equal(once, first) and not torch.equal(again, first)


def test_the_generators_state_can_be_kept() -> None:
    x = torch.ones(100, device=DEVICE)
    generator = torch if DEVICE == "cpu" or SIMULATED else torch.get_device_module(DEVICE)
    state = generator.get_rng_state()
    first = torch.nn.functional.dropout(x)
    generator.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(x), first)


def test_a_graph_that_was_freed_gives_no_second_gradient() -> None:
    """As natively: or an unnoticed second backward() would add to the gradient."""
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    loss = drop(x, 1).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_see_what_is_kept_for_the_gradient() -> None:
    """By them activations are offloaded, or computed again."""
    x, kept = torch.ones(8, device=DEVICE, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):
        result = drop(x, 1)
    result.sum().backward()
    assert len(kept) == 1 and torch.equal(x.grad, result.detach())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_neighbours_are_independent(p: float) -> None:
    """Of pairs at any small distance, p² are dropped both: within five standard deviations."""
    dropped = (drop(torch.ones(20000, device=DEVICE), 3, p) == 0).cpu()
    for distance in (1, 2, 64, 512, 1024, 2048):
        both = (dropped[distance:] & dropped[:-distance]).float().mean().item()
        deviation = (p * p * (1 - p * p) / (20000 - distance)) ** 0.5
        assert abs(both - p * p) < 5 * deviation, distance


@pytest.mark.skipif(not TRITON, reason="native draws its numbers in another order")
def test_a_position_in_memory_decides_not_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.dropout.kernel import triton_level

    x = torch.ones(9000, device=DEVICE)
    usual = drop(x, 1)
    monkeypatch.setattr(triton_level, "most_programs", lambda device: 2)
    triton_level._program.cache_clear()
    assert torch.equal(drop(x, 1), usual)
    triton_level._program.cache_clear()
    assert torch.equal(drop(x.view(90, 100).t(), 1).t().reshape(-1), usual)


def test_the_gradient_has_the_same_mask() -> None:
    x = torch.randn(30, 40, device=DEVICE).t().requires_grad_()
    y = drop(x, 1, 0.3)
    for cotangent in (
        torch.ones_like(y),
        torch.ones(40, 30, device=DEVICE),
        torch.ones(1, device=DEVICE).expand(40, 30),
    ):
        (grad,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        assert torch.equal(grad == 0, y == 0)
        assert torch.allclose(grad[grad != 0], torch.tensor(1 / 0.7, device=DEVICE))


def test_a_checkpoint_draws_the_same_again() -> None:
    results = []
    for reentrant in (True, False):
        x = torch.ones(200, device=DEVICE, requires_grad=True)
        torch.manual_seed(5)
        y = checkpoint(lambda t: torch.nn.functional.dropout(t).exp(), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad == 0, y == 1)
        results.append(x.grad)
    assert torch.equal(*results)


def test_the_mask_is_the_kernels_own(registered) -> None:
    drop(torch.ones(10, device=DEVICE), 1)
    torch.nn.functional.dropout(torch.ones(10, device=DEVICE), training=False)
    assert registered.counts.kernel == 1 and registered.counts.fallbacks == {"not-training": 1}
