"""What is done to an activation that our kernels don't call: then the original does."""

from __future__ import annotations

import pytest

from tests.support.passed_children import CASES, CHANGES, Change, another_module, assert_seen
from tests.support.triton_device import DEVICE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("change", [*CHANGES, another_module], ids=lambda change: change.__name__)
def test_a_child_that_the_kernel_goes_past(case: str, change: Change) -> None:
    assert_seen(case, "triton", change, before=change in CHANGES, device=DEVICE)
