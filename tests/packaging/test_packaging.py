"""The wheel and the sdist: what is in them, and that the wheel works where nothing else of the project is.

Building takes hatchling from the package index. The environment that the wheel goes into shares only the dependencies
of the one that runs the tests: a path file makes them visible, and an editable install isn't followed through it.
"""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER_SHIPPED = (".ci/", ".github/")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> set[str]:
    """The repository's files, new ones too."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {name for name in listed if (ROOT / name).exists()}


def in_wheel(name: str) -> str | None:
    """Where a file of the repository is in the wheel; None when it isn't."""
    for source, place in (
        ("src/twinkle/", "twinkle/"),
        ("ops/", "ops/"),
        ("configs/devices/", "twinkle/aten/devices/"),
        ("templates/operator/", "twinkle/aten/template/"),
    ):
        if name.startswith(source):
            return place + name.removeprefix(source)
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, from the tree."""
    folder = tmp_path_factory.mktemp("dist")
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    requirement = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run(tools / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", *requirement)
    run(tools / "bin" / "python", "-m", "hatchling", "build", "-d", folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    site = Path(run(folder / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["-qq", "--no-index", "--no-deps", "--force-reinstall"]
    run(folder / "bin" / "python", "-m", "pip", "install", *options, built[0])
    return folder / "bin"


def test_the_wheel_holds_packages_operators_and_their_data_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    expected = {place for name in tracked() if (place := in_wheel(name))}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"twinkle/py.typed", "twinkle/page.html", "twinkle/aten/routes.json", "ops/clone/benchmark.yaml"} <= names


def test_the_sdist_holds_the_repository(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {name for name in tracked() if not name.startswith(NEVER_SHIPPED)}
    assert names - {"PKG-INFO"} == expected


def test_metadata_and_version_come_from_one_place(built: tuple[Path, Path], clean: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == project["version"] == run(clean / "twinkle-kernel", "--version").split()[-1]
    code = "import twinkle; print(twinkle.__version__, twinkle.__file__)"
    version, file = run(clean / "python", "-c", code, cwd=clean).split()
    assert version == project["version"] and Path(file).is_relative_to(clean.parent)
    offered = {python.rpartition(" ")[2] for python in metadata.get_all("Classifier", []) if "Python :: 3." in python}
    assert offered == {"3.11", "3.12"}, "versions that were tried"


def test_all_is_every_extra_that_users_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    assert named == extras.keys() - {"all", "docs", "test"}


def test_its_command_and_its_operators_work(clean: Path, tmp_path: Path) -> None:
    told = json.loads(run(clean / "twinkle-kernel", "info", "--json", cwd=tmp_path))
    assert str(clean.parent) in json.dumps(told), "operators of the wheel, not of the tree"
    run(clean / "twinkle-kernel", "plan", "tiny:qwen3", cwd=tmp_path)
    run(clean / "twinkle-kernel", "verify", "tiny:qwen3", cwd=tmp_path)
    run(clean / "twinkle-kernel", "ops", "run", "silu", "--level", "kernel", cwd=tmp_path)
    register = "import torch; from ops.clone import register_a1; registration = register_a1(platform='cpu')"
    code = f"{register}; torch.ones(2).clone(); print(registration.counts.kernel)"
    assert run(clean / "python", "-c", code, cwd=tmp_path).strip() == "1"


def test_the_demo_runs(clean: Path, tmp_path: Path) -> None:
    said = run(clean / "twinkle-kernel", "demo", "--steps", "2", cwd=tmp_path)
    assert "rms_norm" in said


def test_types_are_seen_by_those_who_import_it(clean: Path, tmp_path: Path) -> None:
    """A program that uses the public interface, checked strictly, with the wheel's py.typed."""
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import assert_type\n"
        "from torch import nn\n"
        "from twinkle.kernel import KernelChoice, hub, kernelize\n"
        "from twinkle.kernel.report import plan\n"
        "from twinkle.kernel.rows import Report\n"
        "from twinkle.kernel.undo import Undone, unkernelize\n"
        "model = kernelize(nn.Linear(2, 2), {'fused_ce': KernelChoice('causal_lm_loss', ('torch',))})\n"
        "assert_type(model, nn.Module)\n"
        "assert_type(plan(model), Report)\n"
        "assert_type(unkernelize(model), Undone)\n"
        "hub('a/b', 'C', version='1')  # type: ignore[arg-type]\n"
    )
    options = ["--strict", "--python-executable", clean / "python", "--cache-dir", tmp_path / "cache"]
    run(sys.executable, "-m", "mypy", *options, program, cwd=tmp_path)
