"""``twinkle-kernel ops new``: what it makes works at once, and what is wrong with it later is said by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.aten.conftest import DEVICE, INTERPRETED, ROOT
from twinkle.aten import RegistrationError, scaffold
from twinkle.cli import app

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="files are the same on every device")

MEAN = "mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"
ADD = "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def new(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "new", *arguments])


def check(package: Path, level: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, package / "test" / f"{level}_level.py", "cpu"]
    wide = {**os.environ, "COLUMNS": "200"}  # the readline that pytest imports tells further processes of 80
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=wide)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["mish", "relu"])
def test_it_passes_its_checks_from_the_first_minute(name: str, tmp_path: Path) -> None:
    """Of ``relu`` PyTorch has a kernel for sparse tensors, which calls it again on their values."""
    (tmp_path / "ops").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    made = new(name, "--schema", f"{name}(Tensor self) -> Tensor", "--folder", str(tmp_path / "ops"))
    assert made.exit_code == 0, made.output
    assert f"python {tmp_path / 'ops' / name / 'example.py'} cpu" in made.stdout
    assert f'{name} = "ops.{name}.register:SPEC"' in (tmp_path / "pyproject.toml").read_text()
    for level in ("kernel", "op"):
        done = check(tmp_path / "ops" / name, level)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout


@pytest.mark.multiprocess
def test_what_is_wrong_is_said_by_name(tmp_path: Path) -> None:
    """A kernel that only calls the operator, which has no decomposition; one that is wrong; one that raises."""
    package = scaffold.make(scaffold.overload_of("add", ADD), tmp_path)
    done = check(package, "op")
    assert done.returncode == 1
    assert (
        "add: add/contiguous/float32/0, no_grad: served by ['delegated'], should be one of [['kernel']]" in done.stdout
    )
    kernel = package / "kernel" / "torch_level.py"
    kernel.write_text(kernel.read_text().replace("return decomposition", "return 1.001 * decomposition"))
    done = check(package, "kernel")
    assert done.returncode == 1 and "add: torch add/gaps/float32/1: " in done.stdout
    kernel.write_text(kernel.read_text().replace("return 1.001", "return missing"))
    done = check(package, "kernel")
    assert done.returncode == 1 and "the kernel raised NameError: name 'missing' is not defined" in done.stdout


@pytest.mark.parametrize(("name", "schema"), [("gelu", None), ("add", ADD), ("mean", MEAN), ("layer_norm", None)])
def test_it_is_as_the_linter_wants_it(name: str, schema: str | None, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    scaffold.make(scaffold.overload_of(name, schema), tmp_path / "ops")
    for command in (["check"], ["format", "--check"]):
        options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path / "ops")]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout


def test_silu_is_what_came_of_it(tmp_path: Path) -> None:
    """The worked example began with these very files: what nobody had to write is the same."""
    made = scaffold.make(scaffold.overload_of("silu", "aten::silu(Tensor self) -> Tensor"), tmp_path)
    kept = ["__init__.py", "example.py", "kernel/torch_level.py", "goldendata/inputs_spec.yaml"]
    kept += [f"test/{level}_level.py" for level in ("kernel", "op", "framework")]
    for file in kept:
        assert (made / file).read_text() == (ROOT / "ops" / "silu" / file).read_text(), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["silo"], "silo: PyTorch has no aten::silo; did you mean 'silu'?"),
        (["__class__"], "__class__: PyTorch has no aten::__class__"),
        (["silu.out"], "silu.out: PyTorch has no aten::silu.out; did you mean"),
        (["add"], "add: pass one of its overloads as --schema:\n  add.Tensor(Tensor self, Tensor other"),
        (
            ["silu", "--schema", "silu(Tensor x) -> Tensor"],
            "has this schema; there are:\n  silu(Tensor self) -> Tensor",
        ),
        (["item"], "item: it makes no new tensor, or several (begin with a copy of ops/copy_ or ops/item)"),
        (["silu", "--folder", "no/such"], "no folder no/such: run this where the operators' folder is, or name it"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    result = new(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_nothing_is_written_over(tmp_path: Path) -> None:
    overload = torch.ops.aten.silu.default
    package = scaffold.make(overload, tmp_path)
    (package / "reference.py").write_text("mine")
    with pytest.raises(RegistrationError, match="silu: .*/silu is there already .remove it, or edit it"):
        scaffold.make(overload, tmp_path)
    assert (package / "reference.py").read_text() == "mine"


def test_an_operator_is_listed_once(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.entry-points."twinkle.aten_ops"]\nclone = "x"\ntanh = "x"\n\n[tool]\nx = 1\n')
    for _ in range(2):
        assert scaffold.add_entry_point("silu", project) == 'silu = "ops.silu.register:SPEC"'
    lines = 'clone = "x"\nsilu = "ops.silu.register:SPEC"\ntanh = "x"\n'
    assert project.read_text() == f'[project.entry-points."twinkle.aten_ops"]\n{lines}\n[tool]\nx = 1\n'
