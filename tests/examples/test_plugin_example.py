"""The example of a plug-in: its own tests pass, and nothing of it is imported before it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As if it were installed: its sources on the path, and the metadata that a wheel of its pyproject.toml has."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups))
    path = os.pathsep.join(map(str, (tmp_path, PLUGIN / "src", ROOT / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(PLUGIN))
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


def test_it_is_known_before_anything_of_it_is_imported(environment: dict[str, str]) -> None:
    code = """
import json, sys
from twinkle.aten import catalog
from twinkle.kernel.plugins import declared
known = [(each.name, each.value, each.distribution, each.version) for each in declared()]
before = sorted(name for name in sys.modules if name.startswith("my_kernels"))
from twinkle.kernel.registry import backends_of
print(json.dumps([known, "mish" in catalog.names(), before, "mine" in backends_of("rms_norm")]))
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    known, listed, before, there = json.loads(done.stdout)
    assert known == [["my_kernels", "my_kernels:register", "my-kernels", "0.1.0"]]
    assert listed and before == [] and there


@pytest.mark.slow
def test_where_it_is_broken_that_is_a_row_with_the_reason(environment: dict[str, str], tmp_path: Path) -> None:
    """Its package is gone, but its metadata is still there."""
    path = environment["PYTHONPATH"].replace(str(PLUGIN / "src"), str(tmp_path / "nothing"))
    code = """
import json, logging
logging.disable()
from twinkle import presets
from twinkle.kernel import KernelChoice
from twinkle.kernel.report import plan
from twinkle.commands.info import gather
norm = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
(row,) = plan(presets.build("qwen3"), {norm: KernelChoice("rms_norm", ("mine",))}).rows
facts = gather()
operators = [of["error"] for of in facts["operators"] if of["name"] == "my_kernels"]
print(json.dumps([row.state, row.why(), [of["error"] for of in facts["plugins"]], operators]))
"""
    done = run({**environment, "PYTHONPATH": path}, "-c", code)
    assert done.returncode == 0, done.stderr
    state, why, (plugin,), (operator,) = json.loads(done.stdout)
    gone = "ModuleNotFoundError: No module named 'my_kernels'"
    assert state == "kept" and "mine is not registered for op rms_norm" in why and gone in why
    assert gone in plugin and gone in operator
