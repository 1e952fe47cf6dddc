"""Methods within decorators: a kernel in such a place has around it what must be around it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support import fused_lookalikes as lookalikes
from tests.support.models import clean_process  # noqa: F401
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.wrappers import beneath, decorated_as, undecorated

TARGET = "tests.support.fused_lookalikes.DecoratedLayer.forward"


def twice(self: Any, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return 2 * x


class Twice(lookalikes.DecoratedLayer):
    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("mapping", [{TARGET: twice}, {lookalikes.DecoratedLayer: Twice}], ids=["method", "class"])
def test_a_wrapper_that_must_be_its_classs_forward_is(mapping: Any) -> None:
    """As transformers 5.24 checkpoints: whoever stood above that would train without, and need the memory."""
    module, x = lookalikes.DecoratedLayer(), torch.ones(2, 16)
    module(x)
    kernelize(module, mapping)
    assert torch.equal(module(x), 2 * x) and module.acted == 2
    assert report(module).rows[0].calls == 1
    assert unkernelize(module).not_undone == ()
    module(x)
    assert module.acted == 3


def test_other_wrappers_stay_beneath_a_kernel() -> None:
    plain = lookalikes.renames(lambda x: x)
    assert beneath(plain, twice) is twice and undecorated(plain)(3) == 3
    again = decorated_as(plain, lambda x: -x)
    assert (again(old=3), plain(old=3)) == (-3, 3)


def test_a_wrapper_that_holds_nothing_is_none() -> None:
    def call(x: int) -> int:
        return x

    functools.update_wrapper(call, twice)
    assert undecorated(call) is call and decorated_as(call, twice) is twice and beneath(call, twice) is twice
