"""Kernels of somebody else at our dispatch keys, above ours and below it, taken out in any order."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import Profile, catalog, install
from twinkle.aten import registration as registration_module
from twinkle.aten.errors import RegistrationError
from twinkle.aten.keys import effective_keys
from twinkle.aten.spec import OperatorSpec

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="says nothing about kernels"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),
]

ON_PYTHON_CODE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether PyTorch lets a kernel be put upon somebody's Python code; before, that is an error."""
upon_theirs = pytest.mark.skipif(not ON_PYTHON_CODE, reason="this PyTorch refuses it, which the first test is about")


class Other:
    """Somebody's kernel of ``clone``, which counts and calls what it was put upon."""

    def __init__(self, spec: OperatorSpec, key: str) -> None:
        below = torch.library.get_kernel(spec.overload, key)
        self.calls = 0

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return below.call_boxed(keyset, *args, **kwargs)

        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl(spec.overload, kernel, key, with_keyset=True, allow_override=True)

    def close(self) -> None:
        self._library._destroy()


@pytest.fixture
def key(clone: OperatorSpec, chip: Profile) -> Iterator[str]:
    """Where calls of ``clone`` arrive first; what stands there before stands there again."""
    key = effective_keys(clone.overload, chip.found)[0]
    before = repr(torch.library.get_kernel(clone.overload, key))
    yield key
    assert repr(torch.library.get_kernel(clone.overload, key)) == before
    assert registration_module._buried == []


def works(x: torch.Tensor | None = None) -> bool:
    """Whether calls that the kernel takes, and such that it leaves to native, give what they should."""
    given = torch.randn(3, 4, device=DEVICE) if x is None else x
    return torch.equal(given.clone(), given) and given[:0].clone().shape == (0, 4)


def test_upon_theirs_it_stands_or_is_refused(clone: OperatorSpec, chip: Profile, key: str) -> None:
    other = Other(clone, key)
    if ON_PYTHON_CODE:
        with clone.register_a1(platform=chip.platform) as registration:
            assert works() and registration.counts.fallbacks == {"empty": 1}
        assert other.calls == 1
    else:
        with pytest.raises(RegistrationError, match="clone: This is not allowed") as error:
            clone.register_a1(platform=chip.platform)
        assert error.value.code == "already-registered"
    calls = other.calls
    assert works() and other.calls == calls + 2
    other.close()


def test_what_lies_on_top_keeps_working(
    clone: OperatorSpec, chip: Profile, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It calls ours: after close() calls pass through to what was there at first, whoever keeps the handle."""
    counter: dict[str, int] = {}
    registration = clone.register_a1(counter=counter, platform=chip.platform)
    other = Other(clone, key)
    assert works() and (counter["n"], other.calls) == (2, 2)
    with caplog.at_level(logging.WARNING, "twinkle.aten"):
        registration.close()
    assert "something else was registered on top" in caplog.text
    del registration
    gc.collect()
    assert works() and (counter["n"], other.calls) == (2, 4)
    other.close()
    assert works() and other.calls == 4
    with catalog.operator("copy_").register_a1(platform=chip.platform):
        assert works() and counter["n"] == 2


@pytest.mark.parametrize("how", ["close() again", "register anew", "register another", "close another"])
def test_it_is_taken_out_when_it_is_on_top_again(how: str, clone: OperatorSpec, chip: Profile, key: str) -> None:
    another = catalog.operator("copy_").register_a1(platform=chip.platform)
    registration = clone.register_a1(platform=chip.platform)
    other = Other(clone, key)
    registration.close()
    registration.close()
    assert "registration.py" not in repr(torch.library.get_kernel(clone.overload, key)) and works()
    other.close()
    assert "registration.py" in repr(torch.library.get_kernel(clone.overload, key)) and works()
    if how == "close() again":
        registration.close()
    elif how == "register another":
        catalog.operator("embedding").register_a1(platform=chip.platform).close()
    elif how == "register anew":
        with clone.register_a1(platform=chip.platform) as again:
            del registration
            gc.collect()
            assert works() and (again.counts.kernel, again.counts.fallbacks) == (1, {"empty": 1})
    another.close()


@upon_theirs
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_ours_on_theirs_on_ours(order: tuple[int, ...], clone: OperatorSpec, chip: Profile, key: str) -> None:
    """Two of ours, closed or not, are told apart though they were made at one place."""
    first = clone.register_a1(platform=chip.platform)
    other = Other(clone, key)
    first.close()
    second = clone.register_a1(platform=chip.platform)
    handles = [first, other, second]
    for number in order:
        handles[number].close()
        assert works()
        with catalog.operator("copy_").register_a1(platform=chip.platform):
            assert works()
    first.close()


@upon_theirs
def test_what_lies_below_may_be_taken_out_first(
    clone: OperatorSpec, chip: Profile, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then what ours leaves to native goes to what was below that; each call counts once."""
    other = Other(clone, key)
    with clone.register_a1(platform=chip.platform) as registration:
        assert works() and other.calls == 1
        other.close()
        with caplog.at_level(logging.WARNING, "twinkle.aten"):
            assert works() and works()
        assert caplog.text.count("a kernel below twinkle's was taken out") == 1
        counts = registration.counts
        assert (counts.kernel, counts.fallbacks, counts.errors) == (3, {"empty": 3}, 0)
        assert registration.counter["n"] == 6
    assert works()


@upon_theirs
def test_between_two_that_go_the_wrong_way_round(clone: OperatorSpec, chip: Profile, key: str) -> None:
    """What stands on top calls ours, so ours can't be put elsewhere: the error says whom to ask."""
    below = Other(clone, key)
    registration = clone.register_a1(platform=chip.platform)
    above = Other(clone, key)
    below.close()
    message = f"clone: a kernel of somebody else that .* was taken out, and another one stands on top at {key}: take"
    with pytest.raises(RuntimeError, match=message):
        works()
    above.close()
    assert works()
    registration.close()


@upon_theirs
def test_an_error_of_the_same_kind_from_elsewhere_is_passed_on(clone: OperatorSpec, chip: Profile, key: str) -> None:
    """Somebody else's kernel that lost what it stood on: nothing of ours would help."""
    lowest = torch.library.Library("aten", "IMPL")
    native = torch.library.get_kernel(clone.overload, key)
    lowest.impl(clone.overload, lambda keys, *a, **k: native.call_boxed(keys, *a, **k), key, with_keyset=True)
    middle = Other(clone, key)
    with install(["clone"], platform=chip.platform) as installed:
        lowest._destroy()
        with pytest.raises(RuntimeError, match="SafeKernelFunction has been invalidated"):
            works()
        assert middle.calls == 1 and installed.registrations["clone"].counts.kernel == 1
        middle.close()
        assert works()
