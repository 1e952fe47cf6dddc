"""The command ``bench``: its table, its result file, its exit codes and its errors."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from tests.support.results import check_schema
from twinkle.bench import ops as measuring
from twinkle.bench.results import Result, read
from twinkle.cli import app
from twinkle.kernel import registry
from twinkle.kernel.ops.derived import reference_impl
from twinkle.kernel.registry import register_backend

ROOT = Path(__file__).parents[2]
QUICK = ("--quick", "--device", "cpu", "--op", "rms_norm")


def run(*arguments: str, columns: int = 200) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["bench", *arguments])


def test_it_prints_a_table_and_writes_the_results(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    result = run(*QUICK, "--json", str(path))
    assert result.exit_code == 0, result.output
    check_schema(json.loads(path.read_text()))
    rows = read(path).results
    assert {row.case.split("/")[0] for row in rows} == {"rms_norm"}
    lines = result.stdout.splitlines()
    header = next(line for line in lines if line.startswith("op "))
    assert header.split()[:5] == ["op", "shape", "dtype", "pass", "hf"] and "F.rms_norm" in header
    measured = [line for line in lines if re.match(r"rms_norm/\w+ +64x128 ", line)]
    assert len(measured) == 12  # 3 variants, 2 dtypes, forward and with backward
    assert "hat the default mapping takes is the fastest" in result.stdout
    assert f"written: {path}" in result.stdout
    assert any(row.ms for row in rows if row.who == "liger") or "liger for rms_norm: " in result.stdout


def test_no_line_is_cut_on_a_narrow_terminal() -> None:
    result = run(*QUICK, columns=60)
    assert result.exit_code == 0
    # Where there is no room side by side, the case gets a line of its own above the figures.
    assert re.search(r"^rms_norm/llama +64x128 +bfloat16 +f\+b$", result.stdout, re.MULTILINE)


def test_a_backend_of_somebody_else_takes_part(own_registry: None) -> None:
    register_backend("rms_norm", "mine", reference_impl(registry.get_op("rms_norm")))
    result = run(*QUICK)
    assert result.exit_code == 0
    header = next(line for line in result.stdout.splitlines() if line.startswith("op "))
    assert "mine" in header


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "rmsnorm"), "unknown op 'rmsnorm'; did you mean 'rms_norm'?; known: rms_norm, "),
        (("--op", "rotary,moe_experts"), "op 'moe_experts' has no benchmark yet; those that have: rms_norm, "),
        (("--device", "tpu"), "unknown device 'tpu'; did you mean 'xpu'?"),
        (("--device", "xpu"), "no device 'xpu' here: "),
        (("--device", "cpu", "--json", "/"), "--json /: Is a directory"),
    ],
)
def test_what_the_user_can_mend_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"twinkle-kernel: {message}"), result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)
    )
    result = run("--quick")
    assert result.exit_code == 2
    assert result.stderr.endswith("isn't installed: pip install transformers\n")


def test_a_wrong_kernel_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = measuring.Kernel(lambda module, x: x, None, {}, None, "wrong")
    monkeypatch.setattr(measuring, "kernel_of", lambda *arguments: wrong)
    result = run(*QUICK)
    assert result.exit_code == 1
    assert "torch for rms_norm: wrong result: off by" in result.stdout


def test_where_nothing_could_be_measured_the_exit_code_is_3(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = [Result("rms_norm/llama/f", "hf", "64x128", "float32", note="no such class")]
    monkeypatch.setattr(measuring, "measure", lambda *arguments, **settings: nothing)
    result = run(*QUICK)
    assert result.exit_code == 3
    assert "hf for rms_norm: no such class" in result.stdout


def test_an_interrupted_run_shows_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure, calls = measuring.measure, []

    def impatient(*arguments: Any, **settings: Any) -> list[Result]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **settings)

    monkeypatch.setattr(measuring, "measure", impatient)
    result = run(*QUICK, "--json", str(tmp_path / "part.json"))
    assert result.exit_code == 130
    assert "rms_norm/llama" in result.stdout
    found = read(tmp_path / "part.json")
    assert found.results and found.run["settings"]["interrupted"] is True


def test_it_needs_nothing_that_a_wheel_has_not(tmp_path: Path) -> None:
    """The package alone, elsewhere: no checkout, no folder ``benchmarks`` beside it."""
    shutil.copytree(ROOT / "src" / "twinkle", tmp_path / "site" / "twinkle")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import twinkle.cli; "
        f"assert twinkle.__file__.startswith({str(tmp_path)!r}); "
        f"assert 'benchmarks' not in sys.modules; twinkle.cli.app({['bench', *QUICK]!r})"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "rms_norm/llama" in done.stdout
