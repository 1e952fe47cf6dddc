"""The benchmark programs run, say what they measured in one schema, and the committed results hold what is decided."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import harness, kernelize, ops, verdict
from benchmarks.cases import CASES, SHAPES, SMALL
from twinkle.kernel import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.ops.torch_support import FASTER
from twinkle.kernel.testing import with_backends

ROOT = Path(__file__).parents[2]
RESULTS = sorted(p for name in ("ops", "kernelize") for p in (ROOT / "benchmarks" / "results").glob(f"*/{name}*.json"))
CPU = torch.device("cpu")


def check_schema(content: dict) -> None:
    assert content.keys() == {"schema", "run", "results"}
    assert content["schema"] == harness.SCHEMA
    run = content["run"]
    assert run.keys() == {
        "id", "program", "device", "device_type", "threads", "versions", "ceilings", "settings"
    }  # fmt: skip
    assert run["id"].startswith(f"{run['program']}-20")
    assert run["versions"].keys() == {"python", "torch", "triton", "transformers", "liger"}
    assert content["results"]
    for row in content["results"]:
        assert row.keys() == {"case", "who", "shape", "dtype", "ms", "samples", "note"}
        if row["ms"] is None:
            assert row["note"] and not row["samples"], row
        else:
            assert row["ms"].keys() == {"p20", "p50", "p80"}
            assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
            assert row["samples"] >= 2
    keys = [(r["case"], r["who"], r["shape"], r["dtype"]) for r in content["results"]]
    assert len(set(keys)) == len(keys)


def test_ops_quick(tmp_path, capsys):
    run = ops.main(["--quick", "--json", str(tmp_path / "sub" / "ops.json"), "--device", "cpu"])
    content = json.loads((tmp_path / "sub" / "ops.json").read_text())
    check_schema(content)
    assert content["results"] == [vars(r) for r in run.results]
    measured = {(r.case, r.who, r.dtype) for r in run.results if r.ms}
    for case in CASES:
        for direction in ("f", "fb"):
            for dtype in ("float32", "bfloat16"):
                assert (f"{case.op}/{case.variant}/{direction}", "hf", dtype) in measured
                assert ((f"{case.op}/{case.variant}/{direction}", "torch", dtype) in measured) is (case.op in FASTER)
    assert {r.who for r in run.results if not r.ms} <= {"liger", "triton"}
    printed = capsys.readouterr().out
    assert all(f"{case.op}/{case.variant} " in printed for case in CASES)


def test_ops_runs_from_the_root_of_the_repository(tmp_path):
    command = [sys.executable, "-m", "benchmarks.ops", "--quick", "--op", "rotary", "--json", str(tmp_path / "r.json")]
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    content = json.loads((tmp_path / "r.json").read_text())
    check_schema(content)
    assert {r["case"].partition("/")[0] for r in content["results"]} == {"rotary"}


def test_ops_stops_when_its_time_is_up(capsys):
    run = ops.main(["--quick", "--op", "rms_norm", "--budget", "0", "--device", "cpu"])
    assert {(r.ms, r.note) for r in run.results} == {(None, "out of time")}
    assert "out of time" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(ops, "kernel_of", lambda *args: ops.Kernel(lambda m, x: x, None, {}, None, "wrong"))
    run = ops.main(["--quick", "--op", "rms_norm", "--device", "cpu"])
    notes = [r.note for r in run.results if r.who == "torch"]
    assert notes and all(note.startswith("its result is off by") for note in notes)


def test_a_kernel_that_raises_is_not_timed(monkeypatch):
    def raises(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(ops, "kernel_of", lambda *args: ops.Kernel(raises, None, {}, None, "broken"))
    run = ops.main(["--quick", "--op", "geglu", "--device", "cpu"])
    notes = {r.note for r in run.results if r.who == "liger"}
    assert notes == {"calling it raised RuntimeError: no such thing"}


def test_kernelize_quick(tmp_path, capsys):
    kernelize.main(["--quick", "--json", str(tmp_path / "kernelize.json")])
    content = json.loads((tmp_path / "kernelize.json").read_text())
    check_schema(content)
    assert {r["case"] for r in content["results"]} == {
        "import", "call", "kernelize/plan", "kernelize/apply", "kernelize/kernelize", "kernelize/undo"
    }  # fmt: skip
    assert {r["who"] for r in content["results"] if r["case"] == "call"} == {
        "bare", "method", "method, each call checked", "function"
    }  # fmt: skip
    assert "twinkle.kernel" in capsys.readouterr().out


def test_kernelizing_48_layers_takes_less_than_a_second(loopback):
    model = kernelize.meta_model(48)
    own = {k: c for k, c in DEFAULT_KERNEL_CONFIG.items() if ".qwen3_moe." in k}
    for mapping in (None, with_backends(own, "loopback")):
        times = kernelize.kernelize_times(model, mapping, CPU, rounds=5)["kernelize"]
        assert statistics.median(times) < 1000, times


# --- the harness ------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_nobody_always_follows_the_same():
    called: list[str] = []

    class Clock(harness.CpuClock):
        def repeats(self, call):
            return 1

    calls = {who: lambda who=who: called.append(who) for who in "abc"}
    samples = harness.interleaved(calls, Clock(), rounds=3, seconds=60)
    assert "".join(called) == "aabbcc" + "bca" + "cab" + "abc"
    assert {who: len(ms) for who, ms in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_time_ends_the_rounds_but_not_before_the_third():
    assert len(harness.interleaved({"a": lambda: None}, harness.CpuClock(), rounds=50, seconds=0)["a"]) == 3


def test_percentiles():
    assert harness.percentiles([float(n) for n in range(10, -1, -1)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
    assert harness.percentiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}


def test_a_short_call_is_repeated_within_a_sample():
    count = [0]

    def call():
        count[0] += 1

    repeats = harness.CpuClock().repeats(call)
    assert repeats > 10
    count[0] = 0
    ms = harness.CpuClock().start(call, repeats)()
    assert count[0] == repeats and ms < 1


# --- what the results decide ------------------------------------------------------------------------------------------


def rows(**ms: float) -> dict:
    """A result file with ``hf`` at 1 ms in each case; keys are ``dtype_direction``."""
    results = []
    for key, value in ms.items():
        dtype, direction = key.split("_")
        row = {"case": f"rotary/llama/{direction}", "shape": "9x9", "dtype": dtype}
        results += [{**row, "who": who, "ms": {"p50": time}} for who, time in (("hf", 1.0), ("torch", value))]
    return {"results": results}


def test_an_op_is_faster_when_it_is_so_in_every_dtype_and_direction():
    assert verdict.faster(rows(float32_f=0.5, float32_fb=0.9, bfloat16_f=0.9)) == {"rotary"}
    assert verdict.faster(rows(float32_f=0.5, float32_fb=0.9, bfloat16_f=0.99)) == set()
    content = rows(float32_f=0.5)
    small = {"case": "rotary/llama/f", "shape": "x".join(map(str, SMALL["rotary"][0])), "dtype": "float32"}
    content["results"] += [{**small, "who": who, "ms": {"p50": ms}} for who, ms in (("hf", 1.0), ("torch", 2.0))]
    content["results"] += [{**small, "shape": "9x9", "who": "liger", "ms": None}]
    assert verdict.wins(content) == {"rotary": {"float32 f": pytest.approx(0.5)}}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results_have_the_schema_and_name_no_place(path):
    text = path.read_text()
    content = json.loads(text)
    check_schema(content)
    assert content["run"]["device_type"] == path.parent.name
    assert not content["run"]["settings"]["quick"]
    assert platform.node() not in text and "/home/" not in text and "/work/" not in text and "/tmp/" not in text


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name == "ops.json"], ids=lambda path: path.parent.name)
def test_where_the_torch_backends_are_used_is_what_the_results_say(path):
    content = json.loads(path.read_text())
    device = content["run"]["device_type"]
    assert verdict.faster(content) == {op for op, devices in FASTER.items() if device in devices}
    assert {op for op, shapes in SHAPES[device].items() for _ in shapes} == {case.op for case in CASES}


def test_there_are_results_for_the_cpu():
    assert {path.name for path in RESULTS if path.parent.name == "cpu"} >= {"ops.json", "kernelize.json"}
