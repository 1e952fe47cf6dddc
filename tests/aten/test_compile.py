"""``torch.compile``: where its code calls the kernel, and that it is told where it doesn't."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED, SIMULATED
from twinkle.aten import Profile, catalog

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs eagerly only")


def work(x: torch.Tensor) -> torch.Tensor:
    return x.clone() + x.t().contiguous().t()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["clone", "contiguous"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_that_calls_operators_calls_the_kernel(name: str, backend: str, chip: Profile) -> None:
    x = torch.randn(4, 3, device=DEVICE)
    expected = work(x)
    with catalog.operator(name).register_a1(platform=chip.platform) as registration:
        compiled = torch.compile(work, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), expected)
        before = registration.counts.kernel
        assert torch.equal(compiled(x), expected)
        # The second call runs what the first has compiled. AOTAutograd takes composite operators apart: contiguous is
        # a clone there.
        again = registration.counts.kernel - before
        assert again == {"clone": 2, "contiguous": 0 if backend == "aot_eager" else 1}[name]
        assert registration.counts.compiled


def test_compiling_after_close(chip: Profile) -> None:
    """PyTorch's tracer remembers where a kernel stood, and would call into nothing."""
    x = torch.randn(4, 3, device=DEVICE)
    for _ in range(2):
        with catalog.operator("clone").register_a1(platform=chip.platform):
            torch._dynamo.reset()
            torch.compile(work, backend="aot_eager")(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(work, backend="aot_eager")(x), work(x))


@pytest.mark.skipif(SIMULATED, reason="inductor has no code for the simulated device")
def test_inductor_goes_around_it_and_that_is_said(chip: Profile, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 3, device=DEVICE)
    registration = catalog.operator("clone").register_a1(platform=chip.platform)
    assert not registration.counts.compiled
    compiled = torch.compile(lambda t: t.clone() * 2, fullgraph=True)
    assert torch.equal(compiled(x), x * 2)
    before = registration.counts.kernel
    assert torch.equal(compiled(x), x * 2)
    assert registration.counts.kernel == before and registration.counts.compiled
    with caplog.at_level(logging.WARNING, "twinkle.aten"):
        registration.close()
    assert "clone: something was compiled while its kernel was registered" in caplog.text
    assert registration.counts.compiled


def test_nothing_is_said_where_nothing_was_compiled(chip: Profile, caplog: pytest.LogCaptureFixture) -> None:
    with catalog.operator("clone").register_a1(platform=chip.platform) as registration:
        torch.ones(2, device=DEVICE).clone()
    assert not registration.counts.compiled and caplog.text == ""
