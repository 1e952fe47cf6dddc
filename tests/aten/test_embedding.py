"""``embedding`` through PyTorch: the gradients of every kind, and who served them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import embedding

from ops.embedding import SPEC
from tests.aten.conftest import DEVICE, INTERPRETED, SIMULATED, TRITON
from twinkle.aten import Profile
from twinkle.aten.registration import active

OPTIONS = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "the last is padding": {"padding_idx": -1},
    "mean": {"scale_grad_by_freq": True},
    "mean with padding": {"scale_grad_by_freq": True, "padding_idx": 0},
    "sparse": {"sparse": True},
    "sparse with padding": {"sparse": True, "padding_idx": 2},
    "norms": {"max_norm": 1.0},
}


def table(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()


def ids() -> torch.Tensor:
    return torch.tensor([[2, 0, 2], [4, 2, 1]], device=DEVICE)


def forward_and_backward(options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    weight = table()
    if "max_norm" in options:
        weight = weight.detach().clone().requires_grad_()
    result = embedding(ids(), weight, **options)
    result.backward(torch.arange(result.numel(), dtype=result.dtype).view(result.shape).to(DEVICE))
    return result.detach(), weight.grad


@pytest.mark.skipif(not TRITON, reason="it takes Triton")
@pytest.mark.parametrize(("width", "count"), [(1, 4101), (3, 4101), (4100, 5)])
def test_fewer_programs_than_turns(width: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several short rows, or a part of a long one, in each of several turns."""
    from ops.embedding.kernel import triton_level

    monkeypatch.setattr(triton_level, "most_programs", lambda device: 2)
    triton_level._program.cache_clear()
    weight = torch.randn(7, width, device=DEVICE)
    indices = torch.randint(7, (count,), device=DEVICE)
    assert torch.equal(triton_level.embedding_triton(weight, indices), weight[indices])
    triton_level._program.cache_clear()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_kind_of_gradient(options: dict, chip: Profile) -> None:
    if "sparse" in options and SIMULATED:  # the simulated device has no sparse tensors, whoever makes them
        with SPEC.register_a1(platform=chip.platform), pytest.raises(NotImplementedError, match="_sparse_coo_tensor"):
            forward_and_backward(options)
        return
    expected, gradient = forward_and_backward(options)
    with SPEC.register_a1(platform=chip.platform) as registration:
        result, ours = forward_and_backward(options)
    assert torch.equal(result, expected)
    assert ours.layout is gradient.layout
    assert torch.allclose(ours.to_dense(), gradient.to_dense(), rtol=1e-6, atol=0)
    assert registration.counts.kernel == 1
    assert registration.derivative.counts.kernel == (0 if "sparse" in options else 1)


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion on the device: see the next test")
def test_an_index_out_of_range_is_pytorchs_error(chip: Profile) -> None:
    for wrong in (5, -1):
        indices = ids().index_fill(1, torch.tensor([1], device=DEVICE), wrong)
        with pytest.raises(IndexError) as native:
            embedding(indices, table())
        with SPEC.register_a1(platform=chip.platform) as registration, pytest.raises(IndexError) as ours:
            embedding(indices, table())
        assert str(ours.value) == str(native.value)
        counts = registration.counts
        assert (counts.kernel, counts.errors, counts.fallbacks) == (
            (0, 0, {"index-range": 1}) if INTERPRETED else (0, 1, {})
        )


@pytest.mark.skipif(DEVICE != "cuda", reason="there it is an exception")
@pytest.mark.parametrize("wrong", [5, -1])
def test_on_a_cuda_device_an_index_out_of_range_stops_it_as_natively(wrong: int) -> None:
    """In a process of its own, which can't use the device any more."""
    program = f"""
import contextlib, sys, torch
from ops.embedding import register_a1
counter = {{}}
with register_a1(platform="nvidia", counter=counter) if sys.argv[1] == "ours" else contextlib.nullcontext():
    try:
        torch.nn.functional.embedding(torch.tensor([1, {wrong}], device="cuda"), torch.ones(5, 6, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0], sorted(counter.values()))
"""
    said = {
        whose: subprocess.run([sys.executable, "-c", program, whose], capture_output=True, text=True).stdout.strip()
        for whose in ("native", "ours")
    }
    assert said["native"].endswith(" []")
    assert said["ours"] == said["native"].replace("[]", "[1]")


def test_the_gradient_is_the_same_at_each_call(chip: Profile) -> None:
    indices = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with SPEC.register_a1(platform=chip.platform):
        found = []
        for _ in range(3):
            weight = table()
            embedding(indices, weight).pow(2).sum().backward()
            found.append(weight.grad)
    assert all(torch.equal(found[0], other) for other in found)


def test_indices_that_were_written_meanwhile(chip: Profile) -> None:
    with SPEC.register_a1(platform=chip.platform):
        indices = ids()
        result = embedding(indices, table())
        indices += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_both_are_registered_and_taken_back(chip: Profile) -> None:
    with SPEC.register_a1(platform=chip.platform) as registration:
        assert [made.operator for made in active()] == ["embedding", "embedding_dense_backward"]
        assert registration.derivative in active() and registration.derivative.platform == chip.platform
    assert active() == [] and registration.derivative.closed


def test_one_that_stands_there_already_is_an_error_and_nothing_is_left(chip: Profile) -> None:
    with SPEC.companion.register_a1(platform=chip.platform) as first:
        with pytest.raises(RuntimeError, match="embedding_dense_backward: is registered already"):
            SPEC.register_a1(platform=chip.platform)
        assert active() == [first]
