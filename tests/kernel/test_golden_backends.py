"""The default mapping's winners per platform change only on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "kernel" / "golden" / "backends.json"
COMMAND = [sys.executable, "-m", "tests.support.golden_backends"]


def test_the_winners_are_those_of_the_committed_table() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(COMMAND, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    committed = json.loads(FILE.read_text())
    computed = json.loads(result.stdout)
    changed = [
        f"{label}: {target}: {committed.get(label, {}).get(target)} -> {computed.get(label, {}).get(target)}"
        for label in sorted({*committed, *computed})
        for target in sorted({*committed.get(label, {}), *computed.get(label, {})})
        if committed.get(label, {}).get(target) != computed.get(label, {}).get(target)
    ]
    hint = "if that is on purpose, run python -m tests.support.golden_backends --write"
    assert not changed, "\n".join([f"{len(changed)} winners changed; {hint}", *changed[:40]])


def test_what_may_never_win_by_default() -> None:
    committed = json.loads(FILE.read_text())
    assert set(committed) == {"npu", "cuda", "cuda with liger", "cuda with liger alone", "cpu"}
    for label, targets in committed.items():
        assert len(targets) > 100
        for target, (op, winner) in targets.items():
            if op == "moe_experts" or (op == "rotary" and ".qwen3_5" in target):
                assert winner != "liger", f"{label}: {target}"
            assert winner in ("npu", "triton", "liger", "torch", "fla", "kept", "refused"), f"{label}: {target}"
            assert not (label == "cpu" and winner in ("npu", "triton", "liger")), target
            assert not (label.startswith("cuda") and winner == "npu"), target
