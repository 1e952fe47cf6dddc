"""What the READMEs show is run, word for word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.ops import worthwhile
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README_ZH.md")


def code_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(params=READMES)
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that a README's code leaves behind, run from top to bottom in one go. The Hub stays out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names: dict[str, Any] = {"__name__": "readme"}
    for block in code_blocks(request.param):
        exec(compile(block, request.param, "exec"), names)
    yield names
    unkernelize(names["model"])


def test_the_interface_example_runs(shown: dict[str, Any]) -> None:
    rows = report(shown["model"])
    mlp = rows.row("Qwen3MLP.forward")
    assert (mlp.state, mlp.backend, mlp.instances) == ("installed", "inductor", 2)
    norm = rows.row("Qwen3RMSNorm")
    assert norm.state != "installed"
    assert norm.reasons, "the hub layer can't be fetched here, and the row must say so"
    assert rows.row("Qwen2RMSNorm").state == "unused"
    assert rows.row("Qwen3MoeExperts.forward").state == "unused"
    assert shown["registration"].counts.kernel == 1 and shown["registration"].closed


@pytest.mark.parametrize("name", READMES)
def test_the_table_it_shows_is_the_reports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worthwhile, "_every_size", False)  # as it is outside tests
    (shown,) = re.findall(r"```text\n(target .*?)\n```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    model = presets.build("qwen3")
    kernelize(model)
    model(**presets.inputs(model, batch=16, length=256))
    header, norm, mlp, rotary = report(model).table(width=100).splitlines()[:4]
    # With a GPU in the machine Triton refuses the CPU's MLP, instead of not being there.
    assert shown.splitlines() == [header, norm, mlp.replace("refused", "kept   "), rotary]
    unkernelize(model)


@pytest.mark.parametrize("name", READMES)
def test_the_gains_it_shows_are_those_of_the_result_file(name: str) -> None:
    results = json.loads((ROOT / "benchmarks/results/cuda/step.json").read_text())["results"]
    figures = {result["who"]: result["figures"] for result in results}
    text = (ROOT / name).read_text(encoding="utf-8")
    (shown,) = re.findall(r"\n((?:\|.*\n)+)\n.*(?:fused loss|融合损失)", text)
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in shown.splitlines()[2:]]
    assert lines == [
        [
            f"{round(figures[who]['tokens_per_s'], -2):,.0f}",
            f"{figures[who]['kernels']:,.0f}",
            f"{figures[who]['peak_memory_gb']:.1f} GB",
        ]
        for who in ("hf", "liger", "compile", "twinkle", "twinkle+fused_ce", "twinkle+fused_ce+compile")
    ]


def test_its_class_entry_serves_a_qwen2(shown: dict[str, Any]) -> None:
    model = presets.build("qwen2")
    before = model(**presets.inputs(model)).logits
    kernelize(model, shown["mapping"])
    assert isinstance(model.model.norm, shown["MyRMSNorm"])
    torch.testing.assert_close(model(**presets.inputs(model)).logits, before)
    default, own = (row for row in report(model).rows if row.target.endswith(".Qwen2RMSNorm"))
    assert default.state == "overridden"
    assert (own.state, own.instances, own.calls) == ("installed", 5, 5)
    assert own.implementation == "readme.MyRMSNorm"
    unkernelize(model)


def test_its_opt_in_experts_say_why_not_without_a_gpu(shown: dict[str, Any]) -> None:
    model = presets.build("qwen3_moe")
    kernelize(model, shown["mapping"])
    row = report(model).row("Qwen3MoeExperts.forward")
    assert row.op == "moe_experts"
    assert row.state == "installed" or [tried.backend for tried in row.tried] == ["liger"]
    assert row.state == "installed" or row.reasons
    unkernelize(model)


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_backends_is_what_is_registered(name: str) -> None:
    from twinkle.kernel.registry import get_op

    text = (ROOT / name).read_text(encoding="utf-8")
    for line in re.findall(r"^\| `\w+`.*$", text, re.MULTILINE):
        ops, _, backends = (cell.strip() for cell in line.strip("|").split("|"))
        registered = {b for op in re.findall(r"`(\w+)`", ops) for b in get_op(op).implementations}
        assert set(re.findall(r"`(\w+)`", backends)) == registered, line


def test_every_op_that_has_a_reference_has_the_backend_inductor() -> None:
    from twinkle.kernel.registry import ops

    assert [name for name, op in ops().items() if op.reference is None] == ["fla"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in READMES]
    assert "Each of them but `fla`" in texts[0] and "除 `fla` 外" in texts[1]
