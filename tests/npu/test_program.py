"""The program for a person with the chip: it runs to its end, and fails where something is off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simulated_device
from tests.npu.conftest import SIMULATED

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *arguments: str, device: bool = SIMULATED) -> subprocess.CompletedProcess[str]:
    path = [str(simulated_device.autoload(tmp_path, "npu"))] if device else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, ROOT / "script" / "prove_on_npu.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_it_prints_what_there_is_to_know(tmp_path: Path) -> None:
    done = run(tmp_path, "--models", "llama", "gemma2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("torch ") and "torch_npu" in lines[0]
    assert "| rms_norm | available |" in lines and "| moe_experts | available |" in lines
    assert sum(line.startswith("| npu_") and line.endswith(("| True |", "| False |")) for line in lines) == 3
    assert [line.split(" | ")[:3] for line in lines[-2:]] == [["| llama", "ok", "npu"], ["| gemma2", "ok", "npu"]]


@pytest.mark.skipif(not SIMULATED, reason="there is an NPU")
def test_without_the_device_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, device=False)
    assert done.returncode == 2 and done.stderr == "no Ascend NPU here: the package torch_npu is not installed\n"
