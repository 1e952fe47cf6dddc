"""The programs that time a part of a model by itself: experts, attention, the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import attention, loss, moe, program
from tests.support.results import check_schema
from twinkle.bench import clocks
from twinkle.bench.results import Result, read
from twinkle.kernel.ops.sdpa_attention import flex

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu"]

# --- mixtures of experts ----------------------------------------------------------------------------------------------


def test_moe_quick(tmp_path, capsys):
    path = tmp_path / "moe.json"
    run = moe.main([*QUICK, "--threads", "1", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    assert [(row.who, row.case) for row in run.results[:2]] == [("hf", "moe/qwen3_moe/f"), ("hf", "moe/qwen3_moe/fb")]
    assert all(row.ms or "no GPU" in row.note or "no device" in row.note for row in run.results)
    assert "triton: triton: Triton has no GPU to run on" in capsys.readouterr().out


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_quick(tmp_path, capsys):
    path = tmp_path / "attention.json"
    run = attention.main([*QUICK, "--threads", "1", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    kinds, measured = {row.case.split("/")[1] for row in run.results}, {row.who for row in run.results if row.ms}
    assert kinds == attention.MASKS.keys() and measured == {"hf", "eager", "torch"}
    assert {row.note for row in run.results if row.who == "flex"} == {"flex attention has no backward there"}
    assert capsys.readouterr().out.endswith("QUERIES: nothing\n")


def test_timed_steps_follow_one_another_without_waiting(monkeypatch):
    """As the layers of a model do; the host's clock is another."""

    class Told(clocks.CpuClock):
        def __init__(self):
            super().__init__()
            self.said = []

        def start(self, call, repeats):
            self.said.append("start")
            return super().start(call, repeats)

        def wait(self):
            self.said.append("wait")

    done, submitted = Told(), Told()
    monkeypatch.setattr(program, "clock_for", lambda device: done)
    monkeypatch.setattr(program, "host_clock_for", lambda device: submitted)
    fields = program.timed_rounds(lambda: None, CPU, 3)
    assert done.said == submitted.said == ["start"] * 3 + ["wait"]
    assert fields["samples"] == 3 and fields["ms"] and fields["host_us"]


def test_masks_of_attention():
    size = attention.Sizes(64, window=8, documents=4)
    masks = {kind: make(size, CPU) for kind, make in attention.MASKS.items()}
    assert all(mask.dtype == torch.bool and mask.shape == (64, 64) and mask.any(-1).all() for mask in masks.values())
    assert masks.pop("nothing masked").all()
    prefix = masks.pop("prefix")
    assert prefix[:32, :32].all() and not prefix[:32, 32:].any() and torch.equal(prefix[32:], prefix[32:].tril(32))
    assert not any(mask.triu(1).any() for mask in masks.values())
    assert masks["sliding window"].sum(-1).max() == 8 and not masks["padded"][:, 56:].any()
    starts = (masks["packed documents"].int().argmax(-1)).unique()
    assert len(starts) == 4 and all(masks["packed documents"][start, start] for start in starts)


def test_from_which_length_flex_attention_is_faster():
    def rows(length, skipped=0.5, **ms):
        times = {who: dict.fromkeys(("p20", "p50", "p80"), value) for who, value in ms.items()}
        return [
            Result("attention/padded/f", who, f"{length}x4x16", "bfloat16", ms=found, figures={"skipped": skipped})
            for who, found in times.items()
        ]

    short, slow, fast = (
        rows(1024, hf=1, torch=1, flex=2),
        rows(4096, hf=3, torch=1, flex=0.99),
        rows(2048, hf=3, flex=1),
    )
    assert attention.faster_from(short) is attention.faster_from(slow) is attention.faster_from([]) is None
    assert attention.faster_from(short + fast) == 2048
    assert attention.faster_from(fast + slow) is None, "not from there on"
    assert attention.faster_from(fast + rows(8192, hf=1, flex=0.9)) == 2048
    assert attention.faster_from(fast + rows(8192, hf=1, flex=2, skipped=flex.SKIPPED / 2)) == 2048, "it doesn't serve"


def test_flex_attention_serves_from_where_the_results_say():
    files = {path.parent.name: read(path) for path in (ROOT / "benchmarks/results").glob("*/attention.json")}
    decided = {kind: attention.faster_from(found.results) for kind, found in files.items()}
    assert {kind: least for kind, least in decided.items() if least is not None} == flex.QUERIES


# --- loss -------------------------------------------------------------------------------------------------------------


def test_loss_quick(tmp_path, capsys):
    path = tmp_path / "loss.json"
    run = loss.main([*QUICK, "--threads", "1", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    rows = {row.who: row for row in run.results}
    assert rows.keys() == loss.CANDIDATES.keys()
    measured = {who: row for who, row in rows.items() if row.ms}
    assert measured.keys() >= {"hf", "twinkle", "twinkle low memory", "twinkle, 32 chunks"}
    assert all(row.figures["loss"] == pytest.approx(rows["hf"].figures["loss"], abs=1e-5) for row in measured.values())
    assert all(row.figures["dw_error"] < 1e-6 for row in measured.values())
    assert "error of dW" in capsys.readouterr().out


def test_the_exact_gradient_is_the_gradient():
    inputs = loss.Inputs.random((20, 8, 30), torch.float64, CPU)
    inputs.step(loss.all_logits)
    expected = torch.cat([inputs.weight.grad[:5], inputs.weight.grad[-5:]])
    torch.testing.assert_close(loss.exact_gradient(inputs, 10), expected, rtol=1e-6, atol=1e-8)
