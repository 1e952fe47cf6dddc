"""Calls for which the original was measured faster go to it, counted; verification looks away from that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops import worthwhile
from twinkle.kernel.ops.worthwhile import Least, every_size, slower_for
from twinkle.kernel.registry import get_impl
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models
from twinkle.reasons import Reason

MODELING = "transformers.models.qwen3.modeling_qwen3"
NORM = {f"{MODELING}.Qwen3RMSNorm": KernelChoice("rms_norm", ("torch",))}
ROTARY = {f"{MODELING}.apply_rotary_pos_emb": KernelChoice("rotary", ("torch",))}


@pytest.fixture(autouse=True)
def rules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worthwhile, "_every_size", False)


def test_every_rule_is_about_a_backend_that_there_is() -> None:
    for (op, backend), rules in worthwhile.LEAST.items():
        assert not isinstance(get_impl(op, backend), Reason)
        assert all(least.elements > 0 and device in ("cpu", "cuda") for device, least in rules.items())


def test_every_dtype_rule_is_about_a_backend_that_there_is() -> None:
    for (op, backend), rules in worthwhile.SLOW_DTYPES.items():
        assert not isinstance(get_impl(op, backend), Reason)
        assert all(dtypes and device in ("cpu", "cuda") for device, dtypes in rules.items())


def test_a_dtype_in_which_the_original_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worthwhile.SLOW_DTYPES, ("op", "backend"), {"cpu": (torch.float32,)})
    slower = slower_for("op", "backend")
    assert slower(torch.zeros(7)) == "in float32, for which the original is faster"
    assert slower(torch.zeros(7, dtype=torch.bfloat16)) is None
    with every_size():
        assert slower(torch.zeros(7)) is None


def test_a_small_call_is_the_originals_and_a_large_one_the_kernels() -> None:
    norm = Qwen3RMSNorm(128)
    kernelize(norm, NORM, strict=True)
    (row,) = report(norm).rows
    x = torch.randn(1024, 128)
    norm(x[:-1])
    assert (row.calls, row.fallbacks) == (0, {"fewer than 131072 elements, for which the original is faster": 1})
    norm(x)
    assert (row.calls, sum(row.fallbacks.values())) == (1, 1)
    with every_size():
        norm(x[:1])
    assert (row.calls, sum(row.fallbacks.values())) == (2, 1)


@pytest.fixture
def qwen3() -> Iterator[torch.nn.Module]:
    model = presets.build("qwen3")
    yield model
    unkernelize(model)


@pytest.mark.parametrize("mapping", (NORM, ROTARY), ids=("norm", "rotary"))
def test_a_comparison_is_of_the_kernel_whatever_the_size(qwen3: torch.nn.Module, mapping: dict) -> None:
    original = presets.build("qwen3")
    kernelize(qwen3, mapping, strict=True, verify=True)
    (row,) = report(qwen3).rows
    assert row.state == "installed" and row.verified
    compared = compare_models(original, qwen3, presets.inputs(original), presets.loss)
    assert compared and row.calls > 0 and row.fallbacks == {}
    qwen3(**presets.inputs(qwen3))
    assert sum(row.fallbacks.values()) > 0


def test_rules_for_training_and_none_under_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worthwhile, "LEAST", {("op", "backend"): {"cpu": Least(8, in_training=True)}})
    slower, x = slower_for("op", "backend"), torch.zeros(7)
    assert slower(x) == "fewer than 8 elements, for which the original is faster"
    assert slower(torch.zeros(8)) is None and slower(torch.zeros(7, device="meta")) is None
    assert slower_for("op", "another")(x) is None
    with torch.no_grad():
        assert slower(x) is None
    monkeypatch.setattr(worthwhile, "is_compiling", lambda: True)
    assert slower(x) is None


def test_every_size_ends_with_its_block() -> None:
    with pytest.raises(KeyError), every_size():
        with every_size():
            pass
        assert worthwhile._every_size
        raise KeyError
    assert not worthwhile._every_size
