"""``torch.compile``: where its code calls the kernel, and that it is told where it doesn't."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED, SIMULATED
from tests.aten.uses import CALLS, USES
from twinkle.aten import Profile, catalog
from twinkle.aten.spec import Semantics

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs eagerly only")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_operator_is_in_the_table() -> None:
    assert sorted(CALLS) == sorted(USES)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code(name: str, backend: str, chip: Profile, caplog: pytest.LogCaptureFixture) -> None:
    """Its result is right, whoever is called, and that something was compiled is said."""
    if backend == "inductor" and SIMULATED:
        pytest.skip("inductor has no code for the simulated device")

    work = USES[name]
    x = torch.randn(4, 3, device=DEVICE)
    spec = catalog.operator(name)
    registration = spec.register_a1(platform=chip.platform)
    assert not registration.counts.compiled
    compiled = torch.compile(work, backend=backend)
    if CALLS[name][backend] is None:
        with registration, pytest.raises(Exception, match="already associated to a python object"):
            compiled(x)
        return
    results = [compiled(x)]
    before = registration.counts.kernel
    results.append(compiled(x))
    assert registration.counts.kernel - before == CALLS[name][backend], "the second call runs what the first compiled"
    assert registration.counts.compiled
    with caplog.at_level(logging.WARNING, "twinkle.aten"):
        registration.close()
    assert f"{name}: something was compiled while its kernel was registered" in caplog.text
    results.append(compiled(x))
    for result in results:
        if Semantics.RANDOM in spec.semantics:
            kept = result != 0
            assert torch.allclose(result[kept], x[kept] / 0.7)
        else:
            rounded = name == "type_as"  # inductor doesn't round to bfloat16 between what it fuses
            torch.testing.assert_close(result, work(x), **({"rtol": 1e-2, "atol": 1e-2} if rounded else {}))


def test_compiling_after_close(chip: Profile) -> None:
    """PyTorch's tracer remembers where a kernel stood, and would call into nothing."""
    work = USES["clone"]
    x = torch.randn(4, 3, device=DEVICE)
    for _ in range(2):
        with catalog.operator("clone").register_a1(platform=chip.platform):
            torch._dynamo.reset()
            torch.compile(work, backend="aot_eager")(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(work, backend="aot_eager")(x), work(x))


def test_what_was_compiled_before_goes_around_the_kernel_and_that_is_said(
    chip: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all that is registered; after the remedy it is compiled anew, and nothing has to be said."""
    compiled = torch.compile(USES["silu"], backend="inductor" if not SIMULATED else "aot_eager")
    x = torch.randn(4, 3, device=DEVICE)
    compiled(x)
    with catalog.operator("silu").register_a1(platform=chip.platform) as registration:
        assert registration.compiled_before and not registration.counts.compiled
        compiled(x)
        assert SIMULATED or registration.counter["n"] == 0
        with catalog.operator("clone").register_a1(platform=chip.platform) as other:
            assert other.compiled_before
    (said,) = (record.getMessage() for record in caplog.records if record.name == "twinkle.aten")
    assert said.startswith("silu: something was compiled before its kernel was registered, and code made by inductor")
    assert "register first, or call torch._dynamo.reset() now" in said
    caplog.clear()
    torch._dynamo.reset()
    with catalog.operator("silu").register_a1(platform=chip.platform) as registration:
        assert not registration.compiled_before
    assert "compiled before" not in caplog.text


def test_nothing_is_said_where_nothing_was_compiled(chip: Profile, caplog: pytest.LogCaptureFixture) -> None:
    with catalog.operator("clone").register_a1(platform=chip.platform) as registration:
        torch.ones(2, device=DEVICE).clone()
    assert not registration.counts.compiled and caplog.text == ""
