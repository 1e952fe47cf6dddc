"""Whether torch_npu can be used: the device, the package, the functions and their parameters; or why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch_npu

from twinkle import presets
from twinkle.kernel import kernelize, registry
from twinkle.kernel.ops import npu_support
from twinkle.kernel.registry import KernelImpl, availability, get_impl
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

BACKENDS = sorted(name for name, op in registry.ops().items() if "npu" in op.implementations)


def impl(op: str) -> KernelImpl:
    found = get_impl(op, "npu")
    assert isinstance(found, KernelImpl)
    return found


@pytest.mark.parametrize("op", BACKENDS)
def test_here_it_can(op: str) -> None:
    assert availability(impl(op)) is None


def test_a_function_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_npu, "npu_swiglu_backward")
    reason = availability(impl("swiglu"))
    assert reason is not None and reason.code == "no-symbol"
    assert reason.text == f"torch_npu {torch_npu.__version__} has no npu_swiglu_backward"
    assert availability(impl("geglu")) is None, "what others lack is no concern of its"
    model = kernelize(presets.build("llama", device="npu"))
    rows = {row.op: row for row in report(model).rows if row.state != "unused" and "." in row.target}
    assert rows["rms_norm"].backend == "npu" and rows["swiglu"].state == "kept"
    assert "has no npu_swiglu_backward" in rows["swiglu"].why()
    unkernelize(model)


def test_a_parameter_that_is_missing_is_named() -> None:
    available, reason = npu_support.available({"npu_rms_norm": ("epsilon", "rounding")})
    assert not available and reason is not None
    assert reason.text == f"npu_rms_norm of torch_npu {torch_npu.__version__} has no parameter rounding"


def test_a_function_without_a_schema_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_npu, "npu_written_in_python", lambda x, how: x, raising=False)
    assert npu_support.available({"npu_written_in_python": ("how",)}) == (True, None)


def test_without_a_version_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_npu, "__version__")
    _, reason = npu_support.available({"npu_nothing": ()})
    assert reason is not None and reason.text == "torch_npu has no npu_nothing"


def test_a_device_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)  # type: ignore[attr-defined]
    for op in BACKENDS:
        reason = availability(impl(op))
        assert reason is not None and reason.text == "torch.npu.is_available() is False"


@pytest.mark.parametrize(("device", "hint"), [("cpu", None), ("meta", "kernelize(model, device=…)")])
def test_a_model_elsewhere(device: str, hint: Any) -> None:
    model = kernelize(presets.build("llama", device=device))
    for row in report(model).rows:
        if row.op in ("rms_norm", "swiglu", "rotary") and row.state != "unused":
            reasons = next(tried.reasons for tried in row.tried if tried.backend == "npu")
            (reason,) = reasons
            assert reason.text == f"torch_npu's functions run on npu, not on {device}"
            assert (hint in reason.hint) if hint else reason.hint is None
    unkernelize(model)
