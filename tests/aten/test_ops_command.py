"""``twinkle-kernel ops``: what it shows, its exit codes, and the reports."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tests.aten.conftest import PROFILE, ROOT, TRITON
from twinkle.aten import Home, Kernel, Profile, catalog
from twinkle.aten.harness import report
from twinkle.aten.harness.outcome import Outcome
from twinkle.aten.registration import active
from twinkle.aten.spec import OperatorSpec
from twinkle.cli import app


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", *arguments])


def test_the_list(chip: Profile) -> None:
    facts = json.loads(run("list", "--json").stdout)
    assert list(facts["operators"]) == catalog.names()
    clone = facts["operators"]["clone"]["platforms"]
    assert clone["ascend"]["keys"] == ["AutogradPrivateUse1", "PrivateUse1"]
    assert clone["cambricon"]["keys"] == ["PrivateUse1"]
    assert clone[chip.platform]["level"] == ("triton" if TRITON else "torch")
    assert clone["kunlunxin"]["level"] is None
    assert "every allocation ends in" in facts["operators"]["empty"]["by_design"]
    assert facts["platforms"]["kunlunxin"] == "the package torch_xmlir is not installed"
    text = run("list").output
    assert all(name in text for name in catalog.names()) and "kunlunxin: the package torch_xmlir" in text
    assert "torch, never registered" in text and "empty: it is what every allocation ends in" in text


def test_an_operator_that_cannot_be_had_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = catalog.operator
    broken = replace(real("clone"), schema="clone(Tensor self) -> Tensor")
    monkeypatch.setattr(catalog, "operator", lambda name: broken if name == "clone" else real(name))
    text = run("list").output
    assert "Not usable" in text and "clone: this PyTorch" in text and "contiguous" in text


def test_a_run(chip: Profile) -> None:
    result = run("run", "empty_strided", "--level", "op", "--device", PROFILE, "--json")
    assert result.exit_code == 0, result.output
    (outcome,) = json.loads(result.stdout)["outcomes"]
    assert outcome["ok"] is True and outcome["state"] == "passed" and outcome["facts"]["kernel"] > 0
    text = run("run", "empty_strided", "--level", "kernel", "--device", PROFILE).output
    assert "empty_strided  kernel" in text and "passed" in text


def test_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.empty_strided.kernel import torch_level

    right: Callable[..., Any] = torch_level.empty_strided_torch
    monkeypatch.setattr(torch_level, "empty_strided_torch", lambda *a, **k: right(*a, **k).unsqueeze(0))
    result = run("run", "empty_strided", "--level", "kernel", "--device", PROFILE)
    assert result.exit_code == 1 and "shape torch.Size([1, 3, 1050]), expected" in result.output


def test_what_does_not_end_is_a_failed_check_that_says_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The levels catch what a kernel raises, and go on: not this. Nothing stays registered. When the kernel is reached
    the time is as good as over, however long it took until then."""
    from ops.empty_strided.kernel import torch_level

    right: Callable[..., Any] = torch_level.empty_strided_torch
    forever = "def empty_strided_torch(*arguments, **others):\n    soon()\n    while True:\n        sleep(1)\n"
    names: dict[str, Any] = {"sleep": time.sleep, "soon": lambda: signal.setitimer(signal.ITIMER_REAL, 0.1)}
    exec(compile(forever, torch_level.__file__, "exec"), names)
    monkeypatch.setattr(torch_level, "empty_strided_torch", names["empty_strided_torch"])
    for level in ("kernel", "op"):
        result = run("run", "empty_strided", "--level", level, "--device", PROFILE, "--time-limit", "500")
        assert result.exit_code == 1, result.output
        assert "it was not done within 500 s; it was at empty_strided/kernel/torch_level.py:4" in result.output
    assert active() == [] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    monkeypatch.setattr(torch_level, "empty_strided_torch", right)
    assert run("run", "empty_strided", "--level", "kernel", "--device", PROFILE, "--time-limit", "60").exit_code == 0
    assert "above 0, not 0" in run("run", "--time-limit", "0").stderr


def test_a_device_that_is_not_here() -> None:
    result = run("run", "clone", "--device", "p800")
    assert result.exit_code == 3
    assert "not run" in result.output and "the package torch_xmlir is not installed" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clon"], "clon: no such operator; known: .*clone, .*did you mean 'clone'"),
        (
            ["clone", "--level", "kernl"],
            "unknown level 'kernl'; known: kernel, op, framework, all; did you mean 'kernel'",
        ),
        (["clone", "--device", "cpv"], "unknown device profile 'cpv'; known: .*did you mean 'cpu'"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str) -> None:
    result = run("run", *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and re.search(message, result.stderr)


def test_unusable_inputs_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = catalog.operator("clone")
    (tmp_path / "goldendata").mkdir()
    (tmp_path / "goldendata" / "inputs_spec.yaml").write_text("- a")
    moved = replace(spec, home=Home(spec.home.package, tmp_path))
    monkeypatch.setattr(catalog, "operator", lambda name: moved)
    result = run("run", "clone", "--level", "kernel", "--device", PROFILE)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "inputs_spec.yaml: a list of calls is a mapping" in result.stderr


def test_a_path_that_leads_nowhere_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    right = catalog.operator
    wrong = replace(right("clone"), kernels={"torch": Kernel("kernel.torch_level:clone_torc")})
    monkeypatch.setattr(catalog, "operator", lambda name: wrong if name == "clone" else right(name))
    result = run("run", "clone", "--level", "kernel", "--device", PROFILE)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "did you mean 'clone_torch'?" in result.stderr
    listed = run("list")
    assert listed.exit_code == 0 and "no clone_torc in" in listed.output


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "twinkle.cli", "ops", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_the_help() -> None:
    group = typer.main.get_command(app).commands["ops"]  # type: ignore[attr-defined]
    for command in group.commands.values():
        assert "Examples" in command.help and max(map(len, command.help.splitlines())) <= 78
        assert all(parameter.help for parameter in command.params)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_every_report_is_what_its_results_give(spec: OperatorSpec) -> None:
    name = spec.name
    assert (ROOT / "ops" / name / "REPORT.md").read_text() == report.render(spec)
    results = json.loads((ROOT / "ops" / name / "reports" / "cpu.json").read_text())["levels"]
    framework = "passed" if spec.by_design is None else "not run"
    assert {level: found["state"] for level, found in results.items()} == {
        "kernel": "passed",
        "op": "passed",
        "framework": framework,
    }


def test_a_report_keeps_what_was_not_run_again(tmp_path: Path, chip: Profile) -> None:
    shutil.copytree(ROOT / "ops" / "clone", tmp_path / "clone")
    spec = replace(catalog.operator("clone"), home=Home("ops.clone", tmp_path / "clone"))
    failed = Outcome("clone", "op", "cpu", 2, ["something"])
    written = report.write(spec, replace(chip, name="cpu"), [failed.to_dict()]).read_text()
    assert "| cpu | op | failed | 2 | 1 problems |" in written
    assert "| cpu | kernel | passed |" in written
