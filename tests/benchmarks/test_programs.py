"""The programs run, and say what they measured in one layout."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import host, kernelize, ops, step, trace, training
from tests.support.results import check_schema
from twinkle.bench import clocks
from twinkle.bench import ops as measuring
from twinkle.bench.cases import CASES, LARGE, OPS, SMALL, Nothing, all_items, host_items, traffic_mb
from twinkle.bench.results import Result, Run, read
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, registry
from twinkle.kernel.ops.torch_support import FASTER
from twinkle.kernel.registry import KernelImpl, register_backend
from twinkle.kernel.testing import with_backends

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu"]


# --- ops and host -----------------------------------------------------------------------------------------------------


def test_ops_quick(tmp_path, capsys):
    path = tmp_path / "sub" / "ops.json"
    run = ops.main([*QUICK, "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    assert read(path).results == tuple(run.results)
    rows = {(r.case, r.who, r.dtype): r for r in run.results if r.ms}
    for case in CASES:
        for direction in ("f", "fb"):
            for dtype in ("float32", "bfloat16"):
                name = f"{case.op}/{case.variant}/{direction}"
                assert ((name, "torch", dtype) in rows) is (case.op in FASTER)
                chosen = [who for (of, who, kind), row in rows.items() if (of, kind) == (name, dtype) and row.chosen]
                assert chosen == ["torch" if "cpu" in FASTER.get(case.op, ()) else "hf"]
    assert {r.who for r in run.results if not r.ms} <= {"liger", "npu", "triton"}
    printed = capsys.readouterr().out
    assert all(f"{case.op}/{case.variant} " in printed for case in CASES)


def test_ops_runs_from_the_root_of_the_repository(tmp_path):
    command = [sys.executable, "-m", "benchmarks.ops", *QUICK, "--op", "rotary", "--json", str(tmp_path / "r.json")]
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    content = json.loads((tmp_path / "r.json").read_text())
    check_schema(content)
    assert {r["case"].partition("/")[0] for r in content["results"]} == {"rotary"}


def test_a_file_that_can_not_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "start", None)
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "file" / "a.json", "the folder"), (tmp_path, "Is a directory")):
        with pytest.raises(SystemExit, match="2"):
            host.main([*QUICK, "--json", str(path)])
        assert reason in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_is_full_in_the_end_loses_nothing(capsys):
    with pytest.raises(SystemExit, match="--json /dev/full: No space left on device"):
        host.main([*QUICK, "--json", "/dev/full"])
    assert "rms_norm/llama" in capsys.readouterr().out


def test_ops_stops_when_its_time_is_up(capsys):
    run = ops.main([*QUICK, "--op", "rms_norm", "--budget", "0"])
    assert {(r.who, r.ms, r.note) for r in run.results} == {("all", None, measuring.OUT_OF_TIME)}
    assert "\n  6 more cases of rms_norm: out of time, a larger --budget gives more\n" in capsys.readouterr().out


def test_a_compiler_that_there_is_no_time_for_is_named(monkeypatch):
    monkeypatch.setattr(measuring, "_measured", lambda item, device, *, compiled, **settings: [])
    clock = iter([0.0, *[70.0] * 99])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    run = Run("ops", CPU)
    items = [item for item in all_items(["geglu"], CPU) if not item.small]
    measuring.measure_all(run, items, budget=100, quick=False, compiled=True, progress=lambda *a: None)
    assert {(r.who, r.note) for r in run.results} == {("inductor", measuring.OUT_OF_TIME)}


def test_host_measures_the_floors_too_but_judges_them_by_nothing(tmp_path):
    host.main([*QUICK, "--json", str(tmp_path / "host.json")])
    check_schema(json.loads((tmp_path / "host.json").read_text()))
    rows = read(tmp_path / "host.json").results
    floors = {r.who for r in rows if r.figures.get("floor")}
    assert floors == {"x * w", "empty Function"}
    measured = [r for r in rows if r.ms]
    assert {r.case.split("/")[0] for r in measured} == {"rms_norm", "swiglu", "rotary"}
    assert all(r.host_us and r.dtype == "bfloat16" for r in measured)
    assert not any(r.chosen for r in measured if r.who in floors)


class Events:
    """Stands for an accelerator's module: its events take the host's time, fifty times."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            return (end.at - self.at) * 50e3

    @staticmethod
    def synchronize():
        pass


def test_on_an_accelerator_small_cases_are_timed_by_events_and_on_the_host(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: Events)
    monkeypatch.setattr(clocks, "clock_for", lambda device, **_: clocks.EventClock(device, cache_bytes=1024))
    monkeypatch.setattr(clocks, "host_clock_for", clocks.SubmitClock)
    (item,) = host_items(["rms_norm"])
    for small in (True, False):
        rows = measuring.measure(dataclasses.replace(item, small=small), CPU, seconds=0, rounds=3, compiled=False)
        timed = [row for row in rows if row.ms]
        assert {row.case.split("/")[-1] for row in timed} == {"f", "fb"}
        for row in timed:
            assert bool(row.host_us) is small
            if row.host_us:  # which was not taken from the events
                assert row.host_us["p20"] < row.ms["p50"] * 1e3


def test_a_floor_gives_every_gradient():
    weight, x = torch.ones(8, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    Nothing.apply(x, weight).backward(torch.ones(4, 8))
    assert x.grad is not None and weight.grad is not None


def test_small_cases_come_before_what_there_may_be_no_time_for():
    for device in (CPU, torch.device("cuda")):
        items = all_items(OPS, device)
        small = [number for number, item in enumerate(items) if item.small]
        assert {items[number].case.op for number in small} == set(OPS)
        first_fp32 = next(number for number, item in enumerate(items) if item.dtype == torch.float32)
        assert max(small) < first_fp32
        assert len({(i.case, i.shape, i.dtype) for i in items}) == len(items)
    assert LARGE["cpu"].keys() == LARGE["accelerator"].keys() == SMALL.keys() == set(OPS)


def test_traffic_is_counted_in_passes():
    assert traffic_mb("rms_norm", (1000, 1000), torch.bfloat16, "f") == 4
    assert traffic_mb("swiglu", (1000, 1000), torch.float32, "fb") == 32
    assert traffic_mb("rotary", (1, 1000, 3, 2, 100), torch.bfloat16, "fb") == 4


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    wrong = measuring.Kernel(lambda m, x: x, None, {}, None, "wrong")
    monkeypatch.setattr(measuring, "kernel_of", lambda *args: wrong)
    run = ops.main([*QUICK, "--op", "rms_norm"])
    notes = [r.note for r in run.results if r.who == "torch"]
    assert notes and all(note.startswith(f"{measuring.WRONG}off by") for note in notes)


def test_a_wrong_kernel_at_a_site_that_its_backend_refuses_is_no_failure(own_registry):
    """A backend that takes Llama's norms only, given Gemma's as well."""
    build = registry.get_op("rms_norm").load_reference().build
    narrow = KernelImpl(
        lambda target, site: build(dataclasses.replace(site.variant, offset=0.0)),
        lambda: (True, None),
        lambda site: None if site.variant.offset == 0 else "only offset 0",
    )
    register_backend("rms_norm", "narrow", narrow)
    run = ops.main([*QUICK, "--op", "rms_norm"])
    assert {r.note for r in run.results if r.who == "narrow" and r.note} == {"only offset 0"}
    assert any(r.ms for r in run.results if r.who == "narrow")


def test_a_kernel_that_raises_is_not_timed(monkeypatch):
    def raises(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(measuring, "kernel_of", lambda *args: measuring.Kernel(raises, None, {}, None, "broken"))
    run = ops.main([*QUICK, "--op", "geglu"])
    notes = {r.note for r in run.results if r.who == "liger"}
    assert notes == {"calling it raised RuntimeError: no such thing"}


def test_a_kernel_that_sends_the_call_back_is_not_what_the_default_mapping_takes(monkeypatch):
    kernel_of = measuring.kernel_of

    def picky(case, backend, target, site):
        kernel = kernel_of(case, backend, target, site)
        return dataclasses.replace(kernel, accepts_call=lambda *a: "too small") if backend == "torch" else kernel

    monkeypatch.setattr(measuring, "kernel_of", picky)
    run = ops.main([*QUICK, "--op", "rotary"])
    assert {r.note for r in run.results if r.who == "torch"} == {"too small"}
    assert {r.who for r in run.results if r.chosen} == {"hf"}


def test_too_little_memory_is_a_row(monkeypatch):
    def full(*args, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measuring, "measure", full)
    run = ops.main([*QUICK, "--op", "rms_norm"])
    assert {r.note for r in run.results} == {"the device's memory is too small for it"}


# --- kernelize --------------------------------------------------------------------------------------------------------


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


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_quick(tmp_path, capsys):
    path = tmp_path / "training.json"
    run = training.main([*QUICK, "--threads", "1", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    assert read(path).curves == run.curves
    assert list(run.curves) == ["hf", "hf order 1", "hf order 2", "twinkle+fused_ce"]
    assert all(len(losses) == 12 and losses[-1] < losses[0] for losses in run.curves.values())
    assert "causal_lm_loss by torch: 12 calls" in run.results[-1].note
    assert max(step.used for step in training.judged(run.curves)) <= 1
    assert "is within the original's own spread" in capsys.readouterr().out


def test_a_curve_that_leaves_the_spread_is_told():
    losses = {who: [3.0, 2.0, 1.0] for who in ("hf", "hf order 1", "hf order 2")}
    losses["hf order 1"] = [3.0, 2.01, 1.01]
    assert [step.used > 1 for step in training.judged({**losses, training.OURS: [3.0, 2.02, 1.05]})] == [
        False,
        False,
        True,
    ]


# --- step -------------------------------------------------------------------------------------------------------------


def test_step_quick(tmp_path, capsys):
    path = tmp_path / "step.json"
    run = step.main(
        [*QUICK, "--threads", "1", "--candidates", "hf,liger,twinkle+fused_ce+compile", "--json", str(path)]
    )
    check_schema(json.loads(path.read_text()))
    assert read(path).results == tuple(run.results)
    rows = {row.who: row for row in run.results}
    ours = "twinkle+fused_ce+compile"
    assert list(rows) == ["hf", "liger", ours]
    for who, more in (("hf", set()), (ours, {"graphs", "graph_breaks"})):
        assert rows[who].figures.keys() == {"loss", "first_step_s", "tokens_per_s"} | more
        assert rows[who].host_us["p50"] <= rows[who].ms["p50"] * 1e3
    assert "causal_lm_loss torch x1, rms_norm torch x9" in rows[ours].note
    assert (rows[ours].figures["graphs"], rows[ours].figures["graph_breaks"]) == (1, 0)
    assert rows["liger"].ms or "no device for Liger" in rows["liger"].note
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and f"{ours}: " in printed


def test_a_step_of_experts():
    run = step.main([*QUICK, "--threads", "1", "--model", step.QWEN3_MOE.name, "--candidates", "hf,twinkle"])
    rows = {row.who: row for row in run.results}
    assert rows["hf"].ms and rows["twinkle"].ms, [row.note for row in run.results]


def test_a_step_that_takes_too_long_or_fails_is_a_row_with_the_reason(capfd):
    settings, toy = {"seconds": 0.0, "compiler": "aot_eager"}, step.toy(step.QWEN3_SMALL)
    row = step.run_alone("hf", toy, CPU, timeout=0.2, **settings)
    assert row.ms is None and row.note.startswith("out of time")
    row = step.run_alone("hf", toy, torch.device("mps"), timeout=60, **settings)
    assert row.ms is None and row.note.startswith("its process ended with exit code 1: ")
    assert "Traceback" in capfd.readouterr().err


def test_a_step_with_another_loss_is_not_reported_as_fast():
    times = {"p20": 1.0, "p50": 1.0, "p80": 1.0}
    original, near, far = (
        Result("step/toy", who, "2x32", "bfloat16", ms=times, samples=3, figures={"loss": loss})
        for who, loss in (("hf", 5.0), ("near", 5.02), ("far", 5.04))
    )
    assert step.checked(near, original) is near and step.checked(original, None) is original
    assert step.checked(far, original).ms is None
    assert step.checked(far, original).note == "wrong result: its loss is 5.0400, the original's 5.0000"


def test_an_unknown_candidate_is_named(capsys):
    with pytest.raises(SystemExit):
        step.main(["--candidates", "hf,tinkle"])
    assert "no candidate 'tinkle'; did you mean 'twinkle'?" in capsys.readouterr().err


def test_busy_time_counts_overlapping_work_once_and_no_annotations():
    events = [
        {"ph": "X", "cat": "kernel", "ts": 0, "dur": 1000},
        {"ph": "X", "cat": "kernel", "ts": 500, "dur": 1000},
        {"ph": "X", "cat": "kernel", "ts": 600, "dur": 100},
        {"ph": "X", "cat": "gpu_memset", "ts": 3000, "dur": 500},
        {"ph": "X", "cat": "gpu_user_annotation", "ts": 0, "dur": 9000},
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9000},
        {"ph": "i", "cat": "kernel", "ts": 0},
    ]
    assert trace.device_figures(events) == {"kernels": 3, "gpu_busy_ms": 2.0}
    assert trace.device_figures(events[-2:]) == {}
