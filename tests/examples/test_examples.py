"""Every example runs as it stands, and does what it says."""

from __future__ import annotations

import gc
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from twinkle.aten.registration import active
from twinkle.kernel.ops import worthwhile

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SAYS = {
    "plain_loop": r"Qwen3RMSNorm +rms_norm +installed +torch +model +9 +45 +0",
    "lora": r"Qwen3RMSNorm by torch: 45 calls",
    "own_op": r"squared_relu +installed +fast +model +2 +2 +0",
    "own_operator": r"Counts\(kernel=1, fallbacks=\{'empty': 1\}, errors=0, compiled=False\)",
    "hub_kernel": r"a hub kernel that is not fetched for a plan(.|\n)*Qwen3RMSNorm +- +installed, verified +hub",
    "choose_by_measurement": r"original: [\d.]+ ms\ntorch: [\d.]+ ms\nfastest: (original|torch)\n",
}
"""Example -> what it prints."""

ELSEWHERE = {"fsdp2"}


def test_every_example_is_run_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == SAYS.keys() | ELSEWHERE
    listed = re.findall(r"^\| \[([\w/.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert files <= {Path(name).stem for name in listed}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", SAYS)
def test_it_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    if name == "hub_kernel":
        pytest.importorskip("kernels")
    monkeypatch.setattr(worthwhile, "_every_size", False)  # as it is outside tests
    monkeypatch.setenv("COLUMNS", "120")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(SAYS[name], printed), printed
    assert active() == [] and "LOCAL_KERNELS" not in os.environ
    gc.collect()  # a model that is kernelized to the end shares a function with all others of the process


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fsdp2_in_two_processes() -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "fsdp2.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank (\d): Qwen3RMSNorm by torch, (\d+) calls", done.stdout)) == [
        ("0", "45"),
        ("1", "45"),
    ]
    losses = [float(loss) for loss in re.findall(r"rank 0, step \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]
