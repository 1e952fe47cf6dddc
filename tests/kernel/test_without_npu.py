"""On a machine without an Ascend NPU every row of the default mapping says why the npu backend isn't used."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.registry import availability, get_impl
from twinkle.kernel.report import plan
from twinkle.reasons import Reason

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")

OPS = sorted({choice.op for choice in DEFAULT_KERNEL_CONFIG.values() if "npu" in choice.backends})


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_row_says_why_not(name: str) -> None:
    rows = [row for row in plan(presets.build(name, device="meta")).rows if row.state != "unused"]
    rows = [row for row in rows if row.op in OPS]
    assert rows
    for row in rows:
        tried = next(tried for tried in row.tried if tried.backend == "npu")
        assert [reason.text for reason in tried.reasons] == ["the package torch_npu is not installed"], row.target


@pytest.mark.parametrize("op", OPS)
def test_an_op_alone(op: str) -> None:
    impl = get_impl(op, "npu")
    reason = impl if isinstance(impl, Reason) else availability(impl)
    assert reason is not None and "torch_npu is not installed" in reason.text
