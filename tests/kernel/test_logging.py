"""What is logged: a default run is quiet, and what somebody asked for and didn't get is a WARNING."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support import toys
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.report import plan, report
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("loopback")

QWEN3 = "transformers.models.qwen3.modeling_qwen3"


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, "twinkle")
    yield


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("twinkle") and r.levelno == level]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_default_run_is_quiet(caplog: pytest.LogCaptureFixture, name: str) -> None:
    model = presets.build(name)
    kernelize(model)
    kernelize(model)
    presets.loss(model(**presets.inputs(model))).backward()
    report(model).table()
    skipped = [row for row in report(model).rows if row.state not in ("installed", "unused")]
    unkernelize(model)
    assert [r for r in caplog.records if r.name.startswith("twinkle") and r.levelno >= logging.WARNING] == []
    assert bool(logged(caplog, logging.DEBUG)) is bool(skipped), "what is skipped can be seen by who wants to"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe"])
def test_every_row_is_logged_at_its_level(caplog: pytest.LogCaptureFixture, name: str) -> None:
    model = presets.build(name)
    kernelize(model, {**DEFAULT_KERNEL_CONFIG})
    assert logged(caplog, logging.WARNING) == [], "the default extended by nothing is the default"
    caplog.clear()
    mapping = with_backends(DEFAULT_KERNEL_CONFIG, "loopback")
    kernelize(model, mapping)
    rows = report(model).rows
    installed, kept = ([row for row in rows if row.state == state] for state in ("installed", "kept"))
    info, warnings = logged(caplog, logging.INFO), logged(caplog, logging.WARNING)
    assert len(info) == len(installed) and len(warnings) == len(kept) + 1
    for line, row in zip(info, installed, strict=True):
        where = "for the whole process" if row.scope == "process" else f"on {row.instances} instances"
        assert row.target.endswith(line.partition(":")[0].split(".", 1)[-1]) and f"by loopback, {where}" in line
    assert "this model has nothing that these entries name" in warnings[-1] and "more" in warnings[-1]
    assert len(warnings[-1]) < 400
    unkernelize(model)


def test_what_was_asked_for_and_not_installed_is_a_warning_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = presets.build("qwen3")
    kernelize(
        model,
        {
            **DEFAULT_KERNEL_CONFIG,
            f"{QWEN3}.Qwen3RMSNorm": KernelChoice("rms_norm", ("nobodys", "npu", "refuse")),
            f"{QWEN3}.Qwen3MLP.forward": KernelChoice("geglu", ("loopback",)),
            f"{QWEN3}.Qwen3Mlp": KernelChoice("swiglu", ("loopback",)),
            toys.ToyNorm: KernelChoice("rms_norm", ("loopback",)),
            f"{QWEN3}.apply_rotary_pos_emb": KernelChoice("rotary", ("loopback",)),
        },
    )
    warnings = logged(caplog, logging.WARNING)
    assert len(warnings) == 4
    norm = next(line for line in warnings if line.startswith("qwen3.Qwen3RMSNorm: refused: "))
    assert all(words in norm for words in ("nobodys is not registered", "refuse refuses everything"))
    assert any(line.startswith("qwen3.Qwen3MLP.forward: refused: ") and "silu" in line for line in warnings)
    assert any("missing" in line and f"nearest: {QWEN3}.Qwen3MLP" in line for line in warnings)
    assert "tests.support.toys.ToyNorm" in warnings[-1] and "llama" not in warnings[-1]
    assert len([line for line in logged(caplog, logging.INFO) if "by loopback" in line]) == 1
    unkernelize(model)


def test_a_plan_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plan(presets.build("qwen3"), {f"{QWEN3}.Gone": KernelChoice("rms_norm", ("npu",))})
    assert [record for record in caplog.records if record.name.startswith("twinkle")] == []
