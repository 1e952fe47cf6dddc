"""The example of a training by ``accelerate launch`` runs as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_with_kernels(tmp_path: Path) -> None:
    example = ROOT / "examples" / "trainer" / "lora.py"
    assert "accelerate launch --multi_gpu --num_processes 2 examples/trainer/lora.py" in example.read_text()
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path),
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [sys.executable, *launch, str(example)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = re.findall(r"process (\d): \S*Qwen3RMSNorm by torch, (\d+) calls", done.stdout)
    assert sorted(calls) == [("0", "180"), ("1", "180")], "nine norms, twenty steps, in each process"
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
