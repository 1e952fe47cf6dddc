"""The framework level in vLLM, where there is no vLLM: what is not run, and what is made of what vLLM did."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from twinkle.aten import catalog, profile
from twinkle.aten.harness import vllm_engine
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.cli import app

WORKER = "VllmWorker-0 7"


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "run", *arguments])


@pytest.mark.skipif(vllm_engine.missing() is None, reason="vLLM is here")
def test_without_vllm_nothing_is_run_and_nothing_passes() -> None:
    result = run("clone", "--level", "framework", "--engine", "vllm")
    assert result.exit_code == 3 and "not run" in result.output and "make test-vllm" in result.output


def test_an_unknown_engine_is_one_line() -> None:
    result = run("clone", "--engine", "vlm")
    assert result.exit_code == 2 and "did you mean 'vllm'" in result.stderr


def compared(name: str = "copy_", **changes: Any) -> Outcome:
    """The outcome of an operator in a run that is right but for what is changed."""
    counts = {"kernel": 3, "fallbacks": {"cast": 1}, "errors": 0, "compiled": False}
    found = {
        "native": [[1, 2, 3]],
        "injected": [[1, 2, 3]],
        "problems": [],
        "role": "VllmWorker-0",
        "counts": {WORKER: counts},
        **changes,
    }
    spec = catalog.operator(name)
    outcome = started(spec, "framework", profile("cpu"))
    facts = {
        "problems": found["problems"],
        "processes": [{"process": WORKER, "role": found["role"]}],
        "operators": {name: {"processes": found["counts"]}},
    }
    runs = tuple({"tokens": found[which], "version": "1"} for which in ("native", "injected"))
    vllm_engine.compare({name: outcome}, [spec], "llama", runs, facts)  # type: ignore[arg-type]
    return outcome


def test_a_right_run_passes() -> None:
    outcome = compared()
    assert outcome.state == "passed" and outcome.facts["engine"] == "vllm 1"
    assert outcome.facts["llama"][WORKER]["kernel"] == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"injected": [[1, 2, 4]]}, "llama: tokens differ"),
        ({"problems": ["EngineCore 5: not activated: RuntimeError"]}, "not activated everywhere: EngineCore 5"),
        ({"role": "EngineCore"}, "llama: no worker left a record"),
        ({"counts": {WORKER: {"kernel": 0, "fallbacks": {"cast": 9}}}}, "llama: no call reached its kernel"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], problem: str) -> None:
    outcome = compared(**changes)
    assert outcome.state == "failed" and problem in "; ".join(outcome.problems)


def test_an_operator_of_its_own_rounding_must_give_the_first_tokens_only() -> None:
    assert compared("silu", injected=[[1, 2, 4]]).state == "passed"
    assert compared("silu", injected=[[1, 3, 3]]).state == "failed"
