"""The command ``bench``: its table, its result file, its exit codes and its errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from tests.support.results import check_schema, row
from twinkle.bench import clocks
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
    path = tmp_path / "bench.json"
    result = run(*QUICK, "--output", str(path))
    assert result.exit_code == 0, result.output
    check_schema(json.loads(path.read_text()))
    rows = read(path).results
    assert {row.case.split("/")[0] for row in rows} == {"rms_norm"}
    lines = result.stdout.splitlines()
    header = next(line for line in lines if line.startswith("op "))
    assert header.split()[:5] == ["op", "shape", "dtype", "pass", "hf"] and "F.rms_norm" in header
    measured = [line for line in lines if re.match(r"rms_norm/\w+ +64x128 ", line)]
    assert len(measured) == 12  # 3 variants, 2 dtypes, forward and with backward
    assert f"written: {path}" in result.stdout
    assert any(row.ms for row in rows if row.who == "liger") or "liger for rms_norm: " in result.stdout


def test_a_quick_run_judges_nothing_and_says_what_it_left_out() -> None:
    text = " ".join(run(*QUICK).stdout.split())
    assert "A quick run shows that everything runs." in text and "inductor was left out: --quick" in text
    assert "at best: " not in text and "is the fastest" not in text and "Slower than" not in text


def test_a_whole_run_is_judged_in_the_words_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"hf": 1.0, "torch": 2.0}
    rows = [row(who, ms, "rotary/llama/fb", chosen=who == "torch") for who, ms in times.items()]
    monkeypatch.setattr(measuring, "measure", lambda *arguments, **settings: rows)
    monkeypatch.setattr(clocks, "ceilings", lambda *arguments: {"copy_gb_per_s": 9.0})
    text = run("--device", "cpu", "--op", "geglu", "--no-inductor").stdout
    assert "at best: 9 GB/s (copy)" in text and "inductor was left out: as asked." in text
    assert "Slower than the original: torch for rotary/llama 9x9 float32 f+b (0.50x)" in text and "/fb" not in text


def test_json_is_pure_and_can_be_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = run(*QUICK, "--json", "--output", str(path))
    assert result.exit_code == 0 and not result.stderr
    printed, written = json.loads(result.stdout), json.loads(path.read_text())
    check_schema(printed)
    assert printed["results"] == written["results"]


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


def test_a_plug_in_takes_part_though_nothing_asked_for_it_before(tmp_path: Path) -> None:
    """CONTRIBUTING's example, installed, in a fresh process."""
    (tmp_path / "my_kernels.py").write_text(
        "from torch import nn\n"
        "from torch.nn.functional import rms_norm\n"
        "from twinkle.kernel.registry import KernelImpl, register_backend\n"
        "class MyRMSNorm(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)\n"
        "def register():\n"
        "    impl = KernelImpl(lambda target, site: MyRMSNorm, lambda: (True, None), lambda site: None)\n"
        "    register_backend('rms_norm', 'mine', impl)\n"
    )
    metadata = tmp_path / "my_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[twinkle.kernel_ops]\nmine = my_kernels:register\n")
    program = f"import twinkle.cli; twinkle.cli.app({['bench', *QUICK]!r})"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (header,) = (line for line in done.stdout.splitlines() if line.startswith("op "))
    assert "mine" in header.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "rmsnorm"), "unknown op 'rmsnorm'; did you mean 'rms_norm'?; known: rms_norm, "),
        (("--op", "rotary,moe_experts"), "op 'moe_experts' has no benchmark yet; those that have: rms_norm, "),
        (("--device", "tpu"), "unknown device 'tpu'; did you mean 'xpu'?"),
        (("--device", "xpu"), "no device 'xpu' here: "),
        (("--device", "cpu", "--output", "/"), "--output /: Is a directory; name a file that can be written"),
        (("--output", "no_such/b.json"), "--output no_such/b.json: there is no folder no_such; make it first"),
        (("--op", ","), "--op ',' names nothing; leave it out, or give names: --op A,B"),
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
    result = run(*QUICK, "--output", str(tmp_path / "part.json"))
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
