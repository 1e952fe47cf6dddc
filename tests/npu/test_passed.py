"""What is done to an activation that torch_npu's functions are in the place of: then the original runs."""

from __future__ import annotations

import pytest
import torch

from tests.support.passed_children import CASES, CHANGES, Change, another_module, assert_seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("change", [*CHANGES, another_module], ids=lambda change: change.__name__)
def test_a_child_that_the_kernel_goes_past(case: str, change: Change) -> None:
    assert_seen(case, "npu", change, before=change in CHANGES, device="npu", dtype=torch.bfloat16)
