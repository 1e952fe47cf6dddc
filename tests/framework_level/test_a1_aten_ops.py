"""A real vLLM with all operators in all of its processes, beside one without: ``make test-vllm``.

It runs in an environment of its own, where vLLM's CPU build is. Every test looks at one of a few runs, which are begun
together, since most of a run is waiting for processes to start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinkle.aten.harness import vllm_engine
from twinkle.engines.merged import merged

if vllm_engine.missing():
    pytest.skip(f"not run: {vllm_engine.missing()}", allow_module_level=True)

ROOT = Path(__file__).parents[2]

CALLED = {"_local_scalar_dense", "copy_", "embedding", "empty_like", "empty_strided", "item", "silu"}
"""Operators that vLLM calls on a CPU while nothing is compiled."""
COMPILED_AWAY = {"embedding", "silu"}
"""Those of them that it calls in code that is compiled."""
PROCESSES = {"MainProcess", "EngineCore", "VllmWorker-0"}


class Run:
    """One run of vLLM, and what our plug-in left of it."""

    def __init__(self, found: dict[str, Any], facts: dict[str, Any]) -> None:
        self.tokens: list[list[int]] = found["tokens"]
        self.modules: list[list[str]] = found["modules"]
        self.log: str = found["log"]
        self.facts = facts

    @property
    def roles(self) -> set[str]:
        return {process["role"] for process in self.facts["processes"]}

    def in_worker(self, operator: str) -> dict[str, Any]:
        """What became of an operator's calls in the worker process."""
        everywhere = self.facts["operators"][operator]["processes"]
        return next((of for process, of in everywhere.items() if process.startswith("VllmWorker-0 ")), {})


def problems(native: Run, injected: Run) -> list[str]:
    """What is wrong with a run in which the operators should be, and change nothing."""
    found = list(injected.facts["problems"])
    if native.tokens != injected.tokens:
        found.append("tokens differ")
    found += [f"{role} left no record" for role in PROCESSES - injected.roles]
    found += [
        f"{name}: its kernel served no call in the worker"
        for name in CALLED
        if name in injected.facts["operators"] and not injected.in_worker(name).get("kernel")
    ]
    return found


def wrong_kernels(folder: Path) -> Path:
    """Our operators again, with one kernel that gives other rows than it should."""
    shutil.copytree(ROOT / "ops", folder / "ops", ignore=shutil.ignore_patterns("__pycache__", "reports", "goldendata"))
    file = folder / "ops" / "embedding" / "kernel" / "torch_level.py"
    text = file.read_text()
    assert text.count("indices") > 1
    file.write_text(f"{text}\n\n_right = embedding_torch\n\n\ndef embedding_torch(*args, **kwargs):\n    {WRONG}\n")
    return folder


WRONG = "return _right(*args, **kwargs).flip(0)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """All runs, by name."""
    folder = tmp_path_factory.mktemp("vllm")
    llama, qwen3 = (vllm_engine.make_model(preset, folder) for preset in vllm_engine.PRESETS)
    wrong = {"PYTHONPATH": str(wrong_kernels(folder / "wrong"))}
    compiled = {"settings": {**vllm_engine.EAGER, "enforce_eager": False}}
    compiled["environment"] = {"VLLM_CACHE_ROOT": str(folder / "cache")}
    wanted: dict[str, tuple[Path, str | None, dict[str, Any]]] = {
        "compiled": (llama, "all", compiled),
        "native-llama": (llama, None, {"look": True}),
        "injected-llama": (llama, "all", {"look": True}),
        "native-qwen3": (qwen3, None, {}),
        "injected-qwen3": (qwen3, "all", {"kill": True}),
        "wrong": (llama, "embedding", {"environment": wrong}),
    }

    def run(name: str) -> Run:
        model, operators, options = wanted[name]
        reports = folder / name
        wishes = {}
        if operators is not None:
            wishes = {"TWINKLE_A1_OPS": operators, "TWINKLE_A1_PLATFORM": "cpu", "TWINKLE_A1_ON_ERROR": "stop"}
            wishes["TWINKLE_A1_REPORT_DIR"] = str(reports)
        return Run(vllm_engine.generate(model, wishes=wishes, **options), merged(reports))

    with ThreadPoolExecutor(3) as pool:
        begun = {name: pool.submit(run, name) for name in wanted}
        yield begun
        for future in begun.values():
            future.cancel()


@pytest.mark.parametrize("preset", vllm_engine.PRESETS)
def test_the_tokens_are_the_same_and_kernels_serve_in_the_worker(runs: dict[str, Future[Run]], preset: str) -> None:
    native, injected = runs[f"native-{preset}"].result(), runs[f"injected-{preset}"].result()
    assert len(native.tokens) == len(vllm_engine.PROMPTS)
    assert len({tuple(row) for row in native.tokens}) > 1 and len(set(native.tokens[-1])) > 1, "nothing to tell apart"
    assert problems(native, injected) == []
    hit = {name for name in injected.facts["operators"] if injected.in_worker(name)}
    assert hit == CALLED, "what vLLM calls has changed: the list here is what must be served"


def test_a_wrong_kernel_is_found(runs: dict[str, Future[Run]]) -> None:
    native, wrong = runs["native-llama"].result(), runs["wrong"].result()
    assert wrong.in_worker("embedding")["kernel"] > 0
    assert problems(native, wrong) == ["tokens differ"]


def test_every_process_has_a_record(runs: dict[str, Future[Run]]) -> None:
    for process in runs["injected-llama"].result().facts["processes"]:
        assert process["error"] is None and process["platform"] == "cpu"
        assert set(process["operators"]) > CALLED
        assert process["operators"]["copy_"]["keys"] == ("CPU",) and process["versions"]["vllm"]


def test_without_the_variables_there_is_no_trace_of_us(runs: dict[str, Future[Run]]) -> None:
    native, injected = runs["native-llama"].result(), runs["injected-llama"].result()
    assert native.modules == [["twinkle", "twinkle.engines", "twinkle.engines.vllm"]], "what the entry point is in"
    assert native.facts["processes"] == [] and "twinkle.engines" not in native.log
    assert all("ops.copy_.register" in modules for modules in injected.modules)


def test_compiled_code_goes_around_operators_and_the_report_says_so(runs: dict[str, Future[Run]]) -> None:
    compiled = runs["compiled"].result()
    assert [len(row) for row in compiled.tokens] == [vllm_engine.TOKENS] * len(vllm_engine.PROMPTS)
    assert compiled.facts["problems"] == []
    (worker,) = (process for process in compiled.facts["processes"] if process["role"] == "VllmWorker-0")
    assert worker["compiled"]
    bypassed = {name for name, of in compiled.facts["operators"].items() if worker["process"] in of["bypassed"]}
    assert bypassed >= COMPILED_AWAY and "copy_" not in bypassed


def test_a_killed_worker_leaves_all_records(runs: dict[str, Future[Run]]) -> None:
    """In this run it was killed and then asked for more, so that the engine died of it."""
    run = runs["injected-qwen3"].result()
    assert "EngineDeadError" in run.log
    assert run.roles >= PROCESSES and run.facts["problems"] == []
    assert run.in_worker("embedding")["kernel"] > 0
