"""The training scripts, as people start them: tiny models in two processes on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "cookbook" / "transformers"
EXPERTS = "ep_fsdp2_lora_qwen3_moe"

pytestmark = pytest.mark.multiprocess


def _free_port() -> int:
    """Below those that the system gives out by itself, or another process may be given it before it is used."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _command(script: str, *options: Any, processes: int = 2) -> tuple[list[str], dict[str, str]]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    own = {
        "PYTHON": sys.executable,
        "NPROC_PER_NODE": str(processes),
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": path,
    }
    return [str(SCRIPTS / f"{script}.sh"), *map(str, options)], {**os.environ, **own, "HF_HUB_OFFLINE": "1"}


def train(
    script: str, folder: Path, *options: Any, processes: int = 2, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The lines of the log."""
    command, variables = _command(script, "--output", folder, "--length", 64, *options, processes=processes)
    done = subprocess.run(
        command, env={**variables, **(environment or {})}, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert "view tensor" not in done.stderr, "FSDP2 would lose its hook to an operation in place"
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log if line["event"] == "step"]


def test_experts_are_trained_and_a_checkpoint_goes_on_anywhere(tmp_path: Path) -> None:
    """The checkpoint of two processes is taken up by one, with the experts all in one place, in two parts a step."""
    options = ("--model", "tiny:qwen3_moe", "--lr", 1e-2, "--steps", 20)
    log = train(EXPERTS, tmp_path / "two", *options, "--save-every", 10)
    start, end = log[0], log[-1]
    assert (start["world_size"], start["ep_size"], start["fsdp_size"]) == (2, 2, 1)
    assert start["lora_parameters"] == start["trained_parameters"] == 30272
    assert start["experts_backend"] == "transformers (grouped_mm)" and not start["baseline"]
    assert start["kernels"]["rms_norm torch"] == 9
    assert end == {"event": "end", "warnings": 0}
    assert [line["folder"][-7:] for line in log if line["event"] == "checkpoint"] == ["step-10", "step-20"]
    assert all(line["tokens_per_second"] > 0 for line in log if line["event"] == "step")
    two = losses(log)
    assert len(two) == 20 and sum(two[-5:]) / 5 < two[0] - 0.8

    again = ("--resume", tmp_path / "two" / "step-10", "--accumulate", 2)
    one = losses(train(EXPERTS, tmp_path / "one", *options, *again, processes=1))
    assert one == pytest.approx(two[10:], rel=1e-4)

    from peft import PeftModel

    from twinkle import presets

    adapted = PeftModel.from_pretrained(presets.build("qwen3_moe"), tmp_path / "two" / "step-20")
    ours = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
    assert ours == start["lora_parameters"]


def test_nothing_of_ours_computes_in_the_baseline(tmp_path: Path) -> None:
    log = train(
        EXPERTS,
        tmp_path,
        *("--model", "tiny:qwen3_moe", "--steps", 2, "--save-every", -1, "--enable-liger", "--experts", "triton"),
        environment={"TWINKLE_TORCH_BASELINE": "True"},
    )
    assert log[0]["kernels"] == {} and log[0]["baseline"]
    assert log[0]["experts_backend"] == "transformers (grouped_mm)"


@pytest.mark.parametrize(
    ("script", "model", "options"),
    [
        ("fsdp2", "tiny:qwen3", ("--lora-rank", 0)),
        ("fsdp2", "tiny:qwen3", ("--accumulate", 2, "--enable-liger")),
        ("ep_fsdp2_lora_qwen3_5_moe", "tiny:qwen3_5_moe", ("--ep-size", 1, "--gradient-checkpointing")),
    ],
)
def test_the_loss_falls(script: str, model: str, options: tuple[Any, ...], tmp_path: Path) -> None:
    log = train(script, tmp_path, "--model", model, "--lr", 1e-2, "--steps", 8, *options)
    found = losses(log)
    assert found[-1] < found[0] - 0.5 and log[-1]["warnings"] == 0
    assert ("causal_lm_loss torch" in log[0]["kernels"]) is ("--enable-liger" in options)


def _said(command: list[str], variables: Mapping[str, str]) -> str:
    """The one line of a script that was given a wrong setting."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    ours = [line for line in done.stderr.splitlines() if line.startswith(f"{EXPERTS}.py: ")]
    assert done.returncode != 0 and len(ours) == 1, done.stderr
    assert f"{SCRIPTS}/training.py" not in done.stderr, "a trace of ours"
    return ours[0]


def test_a_mesh_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    said = _said(*_command(EXPERTS, "--model", "tiny:qwen3_moe", "--output", tmp_path, "--ep-size", 3))
    assert "2 processes can't share experts 3 by 3; expert parallelism may be 1, 2" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--accumulate", "3"), "--batch 8 can't be divided among 1 processes in 3 parts"),
        (("--model", "tiny:qwen3_mo"), "no preset tiny:qwen3_mo; did you mean"),
        (("--resume", "nowhere"), "--resume nowhere: no training.pt there"),
        (("--text", "nowhere.txt"), "--text nowhere.txt: No such file or directory"),
    ],
)
def test_wrong_settings_are_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Without torchrun a script is one process."""
    _, variables = _command(EXPERTS)
    script = str(SCRIPTS / f"{EXPERTS}.py")
    given = ["--model", "tiny:qwen3_moe", "--output", str(tmp_path), *options]
    assert message in _said([sys.executable, script, *given], variables)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the processes")
def test_a_killed_process_ends_the_training(tmp_path: Path) -> None:
    command, variables = _command(EXPERTS, "--model", "tiny:qwen3_moe", "--steps", 100000, "--output", tmp_path)
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("step 3 "):
                break
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        begin = time.monotonic()
        os.kill(int(children[-1]), signal.SIGKILL)
        run.stdout.read()
        assert run.wait(60) != 0
    assert time.monotonic() - begin < 60
