"""The benchmark of several processes, on the CPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")


from benchmarks import distributed, trace
from tests.support.results import check_schema


@pytest.mark.slow
@pytest.mark.multiprocess
def test_quick(tmp_path, capsys):
    path = tmp_path / "distributed.json"
    run = distributed.main(["--quick", "--worlds", "2", "--ep", "0", "--who", "hf,twinkle", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    assert [row.case for row in run.results] == ["distributed/qwen3_moe/2 processes/ep 2"] * 2
    original, ours = run.results
    assert (original.who, ours.who) == ("hf", "twinkle") and original.ms and ours.ms
    assert ours.figures["loss"] == pytest.approx(original.figures["loss"], rel=1e-5)
    assert ours.figures["tokens_per_s"] == pytest.approx(2 * ours.figures["tokens_per_s_each"], rel=1e-3)
    assert ours.note == "experts: transformers (grouped_mm)"
    assert "tokens/s each" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_fails_is_a_row_with_the_reason(capfd):
    run = distributed.main(["--quick", "--worlds", "1", "--who", "hf", "--budget", "0.2"])
    assert [row.note for row in run.results] == ["out of time: not done after 0 s"]
    run = distributed.main(["--model", "tiny:qwen3_mo", "--worlds", "1", "--who", "hf"])
    (row,) = run.results
    assert row.ms is None and "WrongSettings: --model: no preset tiny:qwen3_mo" in row.note


def test_layouts_are_those_that_fit():
    assert distributed.layouts(1, [1, 2, 0]) == [1]
    assert distributed.layouts(4, [1, 2, 0]) == [1, 2, 4]
    assert distributed.layouts(6, [4, 3]) == [3]


def test_kinds_of_work_overlap_and_communication_alone_is_exposed():
    events = [
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv(args)", "ts": 0, "dur": 1000},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 500, "dur": 1000},
        {"ph": "X", "cat": "kernel", "name": "up_kernel", "ts": 1200, "dur": 800},
        {"ph": "X", "cat": "kernel", "name": "cutlass::GemmKernel<GroupProblemShape<int>>", "ts": 2000, "dur": 500},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "ts": 2400, "dur": 200},
        {"ph": "X", "cat": "cpu_op", "name": "up_kernel", "ts": 0, "dur": 9000},
    ]
    pytest.importorskip("triton")
    assert distributed._work(events) == {
        "all_to_all_ms": 1.0,
        "sharding_ms": 1.0,
        "experts_ms": 1.3,
        "rest_ms": 0.2,
        "gpu_busy_ms": 2.6,
        "exposed_ms": 1.2,
    }
    assert trace.kinds_of_work(events[-1:], {}, ()) == {}


def test_every_program_that_multiplies_is_an_experts_product():
    pytest.importorskip("triton")
    assert {"up_kernel", "rows_kernel", "weight_kernel"} <= distributed._products()
    assert "combine_kernel" not in distributed._products()
