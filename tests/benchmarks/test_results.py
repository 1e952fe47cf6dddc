"""Clocks, reading and judging results; and the committed results hold what is decided."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import verdict
from benchmarks.sections import ordered_ops, ranked
from tests.support.results import check_schema, row
from twinkle.bench import clocks, view
from twinkle.bench.cases import CASES, LARGE
from twinkle.bench.results import Result, measured, medians, percentiles, read, significant, spread
from twinkle.document import BarChart
from twinkle.kernel.ops.torch_support import FASTER

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
OPS = [path for path in RESULTS if path.stem == "ops"]


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_nobody_always_follows_the_same():
    called: list[str] = []

    class Clock(clocks.CpuClock):
        def repeats(self, call):
            return 1

    calls = {who: lambda who=who: called.append(who) for who in "abc"}
    samples = clocks.interleaved(calls, Clock(), rounds=3, seconds=60)
    assert "".join(called) == "aabbcc" + "bca" + "cab" + "abc"
    called.clear()
    clocks.interleaved(calls, Clock(), rounds=1, seconds=60, warm_up=0)
    assert "".join(called) == "bca"
    assert {who: len(ms) for who, ms in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_time_ends_the_rounds_but_not_before_the_third():
    assert len(clocks.interleaved({"a": lambda: None}, clocks.CpuClock(), rounds=50, seconds=0)["a"]) == 3


def test_a_short_call_is_repeated_within_a_sample():
    count = [0]

    def call():
        count[0] += 1

    repeats = clocks.CpuClock().repeats(call)
    assert repeats > 10
    count[0] = 0
    ms = clocks.CpuClock().start(call, repeats)()
    assert count[0] == repeats and ms < 1


def test_ceilings_are_measured_with_less_where_memory_is_short(monkeypatch):
    asked = []

    def small_device(device, size, side, dtype):
        asked.append(size)
        if size > 2**24:
            raise torch.OutOfMemoryError("out of memory")
        return {"copy_gb_per_s": 1.0}

    monkeypatch.setattr(clocks, "_ceilings", small_device)
    assert clocks.ceilings(torch.device("cpu")) == {"copy_gb_per_s": 1.0}
    assert asked == [2**25, 2**23]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_percentiles():
    assert percentiles([float(n) for n in range(10, -1, -1)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
    assert percentiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}


def test_the_fields_and_the_text_of_samples():
    fields = measured([float(n) for n in range(11)], [0.001, 0.001, 0.002])
    assert fields["samples"] == 11 and fields["host_us"] == {"p20": 1.0, "p50": 1.0, "p80": 2.0}
    assert spread(fields["ms"]) == "5.00 (2.00 .. 8.00)" and spread(fields["ms"], " ms", "–") == "5.00 ms (2.00–8.00)"
    assert measured([3.0])["host_us"] is None


def test_three_digits_count():
    assert [significant(v) for v in (0.07123, 2.9, 12.0, 99.97, 123.4)] == ["0.0712", "2.90", "12.0", "100", "123"]
    assert [view.factor(v) for v in (0.871, 9.994, 9.996)] == ["0.87x", "9.99x", "10.0x"]


def pairs(**ms: float) -> list[Result]:
    """``hf`` at 1 ms in each case, ``torch`` as given; keys are ``dtype_direction``."""
    found = []
    for key, value in ms.items():
        dtype, direction = key.split("_")
        found += [row(who, time, f"rotary/llama/{direction}", dtype) for who, time in (("hf", 1.0), ("torch", value))]
    return found


def test_an_op_is_faster_when_it_is_so_in_every_dtype_and_direction():
    assert verdict.faster(pairs(float32_f=0.5, float32_fb=0.9, bfloat16_f=0.9)) == {"rotary"}
    assert verdict.faster(pairs(float32_f=0.5, float32_fb=0.9, bfloat16_f=0.99)) == set()
    host = {"p20": 1.0, "p50": 1.0, "p80": 1.0}
    small = [row(who, ms, "rotary/small/f", host_us=host) for who, ms in (("hf", 1.0), ("torch", 2.0))]
    unmeasured = Result("rotary/llama/f", "liger", "9x9", "float32", note="not here")
    found = [*pairs(float32_f=0.5), *small, unmeasured]
    assert verdict.wins(found) == {"rotary": {"float32 f": pytest.approx(0.5)}}


def test_a_comparison_takes_the_cases_that_have_both():
    found = [*pairs(float32_f=0.5, bfloat16_f=0.125), row("torch", 9.0, "rotary/alone/f")]
    assert verdict.compare(found, "rotary", "torch", "hf") == verdict.Comparison(2, pytest.approx(4.0), 2.0, 8.0)
    assert verdict.compare(found, "rotary", "liger", "hf") is None
    assert verdict.compare(found, "rms_norm", "torch", "hf") is None


def test_the_verdict_names_where_the_default_mapping_loses():
    fast = [row("hf", 1.0), row("triton", 0.5, chosen=True)]
    assert view.verdict(fast) == [
        "What the default mapping takes is the fastest, or within 3% of it, in 1 of 1 cases, and never slower than the "
        "original."
    ]
    slow = [row("hf", 1.0, "rotary/slow/f"), row("triton", 2.0, "rotary/slow/f", chosen=True)]
    first, second = view.verdict([*fast, *slow])
    assert first.endswith("in 1 of 2 cases.")
    assert second == "Slower than the original: triton for rotary/slow 9x9 float32 f (0.50x)."


def test_a_table_marks_the_best_and_the_chosen_and_judges_no_floor():
    floor = row("empty", 0.1, figures={"floor": 1.0})
    results = [row("hf", 1.0, figures={"traffic_mb": 2.0}), row("triton", 0.5, chosen=True), floor]
    (table,) = view.tables(results, copy_gb_per_s=4.0)
    assert table.columns == ("variant", "shape", "dtype", "pass", "limit", "hf", "triton", "empty")
    (line,) = table.lines
    assert [cell.text for cell in line] == ["llama", "9x9", "float32", "f", "0.500", "1.00", "0.500 (2.00x)", "0.100"]
    assert [(cell.best, cell.chosen) for cell in line[5:]] == [(False, False), (True, True), (False, False)]


def test_the_chart_of_an_op_begins_at_the_original():
    results = [row("hf", 2.0, "mine/a/f"), row("ours", 1.0, "mine/a/f"), row("theirs", 4.0, "mine/a/f")]
    results += [row("hf", 8.0, "mine/b/f"), row("ours", 1.0, "mine/b/f"), row("hf", 1.0, "yours/a/f")]
    charts = [part for part in view.parts(results, None) if isinstance(part, BarChart)]
    assert [(bar.name, bar.text, bar.style) for bar in charts[0].bars] == [
        ("ours", "4.00x (2.00x .. 8.00x)", ""),
        ("theirs", "0.50x (0.50x .. 0.50x)", "red"),
    ]
    ours, theirs = charts[0].bars
    assert (round(ours.value, 9), ours.low, ours.high) == (3.0, 1.0, 7.0) and theirs.value == -0.5
    assert len(charts) == 1, "of an op that only the original was measured of there is nothing to draw"
    assert not [part for part in view.parts(results, None, quick=True) if isinstance(part, BarChart)]


@pytest.mark.parametrize("content", ["", "[1]", '{"schema": 1}', "\x00"])
def test_what_is_no_result_file_is_refused(content, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.json"):
        read(path)


# --- what the committed results decide --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results_have_the_schema_and_name_no_place(path):
    text = path.read_text()
    content = json.loads(text)
    check_schema(content)
    assert content["run"]["device_type"] == path.parent.name
    assert path.stem.startswith(content["run"]["program"])
    assert not content["run"]["settings"].get("quick") and content["run"]["settings"].get("size") != "quick"
    assert platform.node() not in text and "/home/" not in text and "/work/" not in text and "/tmp/" not in text


@pytest.mark.parametrize("path", OPS, ids=lambda path: path.parent.name)
def test_where_the_torch_backends_are_used_is_what_the_results_say(path):
    found = read(path)
    device = found.run["device_type"]
    assert verdict.faster(found.results) == {op for op, devices in FASTER.items() if device in devices}
    assert LARGE["cpu" if device == "cpu" else "accelerator"].keys() == {case.op for case in CASES}


@pytest.mark.parametrize("path", OPS, ids=lambda path: path.parent.name)
def test_default_chains_are_in_the_order_of_the_results(path):
    found = read(path)
    judged = 0
    for op, chain in ordered_ops().items():
        order = ranked(chain, op, found.results)
        for who, other in zip(order, order[1:], strict=False):
            ratio = verdict.compare(found.results, op, who, other)
            if ratio is not None:
                judged += 1
                assert ratio.mean >= 1 - view.NOISE, f"{op}: {who} comes before {other}, but is {ratio} as fast"
    assert judged >= 3


@pytest.mark.parametrize("path", OPS, ids=lambda path: path.parent.name)
def test_what_the_default_mapping_takes_is_never_slower_than_the_original(path):
    """On small tensors, where the host's work is all there is, by that; there the rules of ops/worthwhile.py help."""
    for key, rows in medians(read(path).results).items():
        (found,) = [row for row in rows.values() if row.chosen]
        ours, theirs = (row.host_us or row.ms for row in (found, rows["hf"]))
        assert ours["p50"] <= theirs["p50"] * (1 + view.NOISE), (key, found.who)


def test_there_are_results_for_the_cpu():
    assert {path.name for path in RESULTS if path.parent.name == "cpu"} >= {"ops.json", "kernelize.json"}
