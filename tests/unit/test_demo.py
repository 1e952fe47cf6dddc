"""The demo: a short one from end to end, and that each of its checks can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.pages import Reader, read_alone
from twinkle.cli import app
from twinkle.commands.demo import command, text, training, worker
from twinkle.commands.demo.outcome import ULP, Outcome, downsampled, judge_losses
from twinkle.commands.demo.page import page
from twinkle.commands.demo.plot import HEIGHT, WIDTH, Series, line_plot
from twinkle.commands.demo.processes import Worker, WorkerFailed
from twinkle.commands.demo.terminal import ASCII_BARS, sparkline
from twinkle.kernel import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.registry import KernelImpl, register_backend

TEXT = "All notable changes to this project are written down here. " * 20


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A real run of a few steps, in two processes, by a backend that needs no compiler; the time ends it."""
    return command.train_both(500, 1.5, "cpu", ("torch",))


@pytest.fixture
def shown(outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on an outcome: its result, and the page that it wrote."""

    def show(changed: Outcome = outcome, *arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(command, "train_both", lambda *given: changed)
        file = tmp_path / "demo.html"
        result = CliRunner().invoke(app, ["demo", "--html", str(file), "--device", "cpu", *arguments])
        return result, file.read_text(encoding="utf-8")

    return show


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_keeps_every_promise(outcome: Outcome) -> None:
    assert [check.name for check in outcome.checks() if not check.passed] == []
    assert 2 <= outcome.steps < 500 and outcome.steps_asked == 500
    assert {len(losses) for losses in [outcome.kernelized.losses, *outcome.orders]} == {outcome.steps}
    assert 2.5e6 < outcome.parameters < 3.5e6
    assert len(outcome.first_step) == len(dict(outcome.first_step)) == 48
    assert {"README.md", "LICENSE", "CONTRIBUTING.md"} <= set(outcome.documents)


def test_a_run_really_calls_the_kernels_and_no_other_curve_is_a_copy(outcome: Outcome) -> None:
    rows = {row["op"]: row for row in outcome.installed}
    # once before the training, and once a step
    assert rows["rms_norm"]["calls"] == 17 * (outcome.steps + 1)
    assert rows["rms_norm"]["backend"] == "torch"
    curves = [outcome.original.losses, outcome.kernelized.losses, *outcome.orders]
    assert len({tuple(curve) for curve in curves}) > 1
    assert outcome.undo["modules"] == 17 and outcome.undo["functions"] >= 0


def test_a_run_measures_both_processes(outcome: Outcome) -> None:
    for measured in (outcome.original, outcome.kernelized):
        assert len(measured.seconds) == outcome.steps and min(measured.seconds) > 0
        assert measured.first_call > 0
        assert measured.memory["peak"] >= (measured.memory["before"] or 1)


def test_the_terminal_shows_plan_curves_figures_and_checks(outcome: Outcome, shown: Any) -> None:
    result, _ = shown()
    assert result.exit_code == 0, result.output
    for part in ("qwen3.Qwen3RMSNorm", "The chain torch serves", "tokens per second", "peak memory", "Undone"):
        assert part in result.output
    for part in ("would install", "npu for rms_norm, ", "(twinkle-kernel plan --all"):
        assert part in result.output
    first, last = outcome.original.losses[0], outcome.original.losses[-1]
    assert f"original    {first:.4f}" in result.output and f"{last:.4f}\n" in result.output
    assert "demo.html" in result.output and "FAILED" not in result.output


@pytest.mark.parametrize("columns", [50, 80])
def test_checks_fit_the_terminal_and_hang(columns: int, outcome: Outcome, shown: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result, _ = shown()
    lines = result.output.partition("\nChecks\n")[2].partition("\n\n")[0].splitlines()
    # A name is never broken; which tensor is the worst, and so how long its name is, differs from machine to machine.
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines), lines
    assert len(lines) > len(outcome.checks())
    assert all(line.startswith(("ok     ", " " * 9)) for line in lines), lines


def test_one_step_is_no_steps(outcome: Outcome) -> None:
    losses = outcome.original.losses[:2]
    original, kernelized = (replace(r, losses=r.losses[:2]) for r in (outcome.original, outcome.kernelized))
    two = replace(outcome, original=original, kernelized=kernelized, orders=[losses, losses])
    assert "1 step; " in next(check.detail for check in two.checks() if check.name.startswith("Later steps"))


def test_the_page_goes_to_a_folder_of_its_own_by_default(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "train_both", lambda *given: outcome)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["demo", "--device", "cpu"]).exit_code == 0
    assert (tmp_path / "out" / "demo.html").exists()


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_holds_both_curves_and_loads_nothing(outcome: Outcome, shown: Any) -> None:
    _, source = shown()
    reader = read_alone(source)
    curves = {attributes["class"]: attributes["points"] for tag, attributes in reader.tags if tag == "polyline"}
    for name in ("curve original", "curve kernelized"):
        assert len((curves[name] or "").split()) == outcome.steps
    assert sum(tag == "circle" for tag, _ in reader.tags) == outcome.steps - 1
    assert "all 5 checks passed" in reader.text and "qwen3.Qwen3RMSNorm" in reader.text
    for part in (
        "would install",
        "npu for rms_norm, ",
        "process: the function",
    ):
        assert part in reader.text
    assert "137 more" not in reader.text and ">fla<" not in source, "what concerns no part of this model"


def test_the_page_escapes_what_it_is_given(outcome: Outcome) -> None:
    hostile = replace(outcome, device_name="<script>alert(1)</script>", refused=[{"backends": [], "reason": "<img>"}])
    assert "<script>alert(1)</script>" in read_alone(page(hostile)).text


# --- each check can fail ----------------------------------------------------------------------------------------------


def _with_rows(outcome: Outcome, **fields: Any) -> dict[str, Any]:
    rows = [row | fields if row["state"] == "installed" else row for row in outcome.report["rows"]]
    return outcome.report | {"rows": rows}


def _broken(outcome: Outcome) -> dict[str, tuple[Outcome, str]]:
    shifted = replace(outcome.kernelized, losses=[loss + 1e-3 for loss in outcome.kernelized.losses])
    flat = replace(outcome.kernelized, losses=outcome.kernelized.losses[:1] * outcome.steps)
    undo = outcome.undo
    return {
        "nothing installed": (replace(outcome, report=_with_rows(outcome, state="kept")), "no kernel could be"),
        "never called": (replace(outcome, report=_with_rows(outcome, calls=0)), "never called: "),
        "none served": (
            replace(outcome, report=_with_rows(outcome, calls=0, fallbacks={"too small": 3})),
            "RMSNorm: too small",
        ),
        "gradient off": (replace(outcome, first_step=[*outcome.first_step, ("bad", 1.01)]), "worst, bad, uses 101%"),
        "gradient no number": (
            replace(outcome, first_step=[*outcome.first_step, ("bad", float("nan"))]),
            "worst, bad, uses nan%",
        ),
        "loss off": (replace(outcome, kernelized=shifted), "of what rounding alone may do"),
        "not learning": (replace(outcome, kernelized=flat), "nats a byte"),
        "class kept": (replace(outcome, undo=undo | {"classes_restored": False}), "has another class than before"),
        "function kept": (replace(outcome, undo=undo | {"functions_restored": False}), "another object than before"),
        "bits changed": (replace(outcome, undo=undo | {"bit_identical": False, "difference": 2e-7}), "differ by 2e-07"),
        "not undone": (replace(outcome, undo=undo | {"not_undone": ["changed since"]}), "changed since"),
    }


def test_a_broken_promise_is_shown_and_makes_the_exit_code_1(outcome: Outcome, shown: Any) -> None:
    for case, (changed, why) in _broken(outcome).items():
        result, source = shown(changed)
        assert result.exit_code == 1, case
        assert "FAILED" in result.output and why in " ".join(result.output.split()), case
        assert "checks failed" in source and why in source, case


def test_a_kernel_that_leaves_these_calls_to_the_original_is_no_broken_promise(outcome: Outcome, shown: Any) -> None:
    """As that of a gated MLP does on a GPU, where the demo's is too small for it; it is told."""
    first, *others = outcome.report["rows"]
    assert first["state"] == "installed"
    declines = outcome.report | {"rows": [first | {"calls": 0, "fallbacks": {"too small": 3}}, *others]}
    result, _ = shown(replace(outcome, report=declines))
    assert result.exit_code == 0
    assert f"none served of {first['target']}: too small" in " ".join(result.output.split())


def test_losses_are_judged_by_the_spread_of_the_originals_own() -> None:
    orders = [[4.0, 3.0, 2.0], [4.0, 3.0, 2.1], [4.0, 3.0, 1.9]]
    within = judge_losses([4.0, 3.0 + 0.9 * ULP * 3.0, 2.39], orders)
    assert [judgement.used <= 1 for judgement in within] == [True, True, True]
    beyond = judge_losses([4.0 + 1.1 * ULP * 4.0, 3.0, 2.41], orders)
    assert [judgement.used <= 1 for judgement in beyond] == [False, True, False]
    # a spread once seen stays allowed, and what is no number is never near
    assert judge_losses([2.39, 2.39], [[2.0, 2.0], [2.1, 2.0], [1.9, 2.0]])[1].used <= 1
    assert judge_losses([float("nan")], [[2.0], [2.1]])[0].used == float("inf")


def test_a_gain_is_claimed_only_where_most_steps_show_it(outcome: Outcome) -> None:
    steps = replace(outcome.original, seconds=[0.9, 1.0, 1.1, 1.2], losses=[3.0] * 4, first_call=1.0)

    def said(seconds: float, first_call: float = 1.0) -> str:
        kernelized = replace(steps, seconds=[seconds] * 4, first_call=first_call)
        return " ".join(replace(outcome, original=steps, kernelized=kernelized, device="cpu").speed())

    assert said(0.5) == (
        "On this CPU the kernels gain: 2.10 times the original's tokens per second, faster in 100% of the steps."
    )
    assert "gain nothing that shows: 1.00 times" in said(1.05)
    assert "gain nothing: 0.53 times" in said(2.0)
    assert "The first call took 19.0 s longer, to compile" in said(0.55, 20.0) and "after 38 steps" in said(0.55, 20.0)
    assert "earns" not in said(1.05, 20.0)


# --- the training -----------------------------------------------------------------------------------------------------


def test_another_summation_order_is_the_same_model_in_exact_arithmetic() -> None:
    ids = next(training.batches(TEXT.encode(), "cpu"))
    order = training.Order(1)
    expected, found = training.exact_results(ids), training.exact_results(ids, order)
    for name, tensor in expected.items():
        largest = tensor.abs().max().item()
        torch.testing.assert_close(order.back(name, found[name]), tensor, rtol=0, atol=1e-13 * largest)
    assert not torch.equal(found["logits"], expected["logits"])  # the rows are in another order, at least


def test_runs_start_from_the_same_weights_and_batches() -> None:
    torch.manual_seed(1)
    first = training.new_model("cpu").state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)  # no global random state is used
    second = training.new_model("cpu").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    one, other = (training.batches(TEXT.encode(), "cpu") for _ in range(2))
    for _ in range(3):
        ids = next(one)
        assert torch.equal(ids, next(other))
        assert bytes(ids[0].tolist()) in TEXT.encode()
    with pytest.raises(ValueError, match="a window needs"):
        next(training.batches(b"short", "cpu"))


# --- choosing what serves ---------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_by_default(monkeypatch: pytest.MonkeyPatch, own_registry: None) -> Iterator[None]:
    """A machine on which the default mapping installs nothing, and whose first opt-in backend doesn't work."""

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the compiler crashed")

    for op in ("rms_norm", "swiglu"):
        register_backend(op, "broken", KernelImpl(lambda target: layer("Broken", broken), lambda: (True, None)))
    mapping = {target: replace(choice, backends=("npu",)) for target, choice in DEFAULT_KERNEL_CONFIG.items()}
    monkeypatch.setattr(worker, "mapping_for", lambda chain: mapping)
    monkeypatch.setattr(worker, "OPT_IN", ("broken", "torch"))
    yield


def test_an_opt_in_backend_serves_where_the_default_installs_nothing(nothing_by_default: None) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    rotary, norm = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3RMSNorm
    kernelized = worker.Kernelized(TEXT, "cpu")
    chosen = kernelized.prepare([])
    assert chosen["backends"] == ("torch",)
    assert [refusal["backends"] for refusal in chosen["refused"]] == [(), ("broken",)]
    assert "installs nothing" in chosen["refused"][0]["reason"]
    assert "the compiler crashed" in chosen["refused"][1]["reason"]
    assert type(kernelized.model.model.norm) is not norm
    assert type(kernelized.model.model.layers[0].mlp) is modeling_qwen3.Qwen3MLP  # what was refused left nothing
    kernelized.step()
    assert max(used for _, used in kernelized.judge_first_step()) <= 1
    undone = kernelized.undo()
    assert undone["classes_restored"] and undone["functions_restored"] and undone["bit_identical"]
    assert type(kernelized.model.model.norm) is norm and modeling_qwen3.apply_rotary_pos_emb is rotary


def test_where_no_backend_works_the_original_is_left_and_the_check_fails(
    nothing_by_default: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "OPT_IN", ("broken",))
    kernelized = worker.Kernelized(TEXT, "cpu")
    chosen = kernelized.prepare([])
    assert chosen["backends"] == () and len(chosen["refused"]) == 2
    assert all(type(module) is kernelized.classes[name] for name, module in kernelized.model.named_modules())
    assert not any(row["state"] == "installed" for row in kernelized.report()["rows"])


def test_an_undo_that_leaves_something_is_noticed(nothing_by_default: None) -> None:
    kernelized = worker.Kernelized(TEXT, "cpu")
    kernelized.prepare(["torch"])
    norm = kernelized.model.model.norm
    genuine = kernelized._undo
    kernelized._undo = lambda: (genuine(), setattr(norm, "variance_epsilon", 0.1))[0]  # type: ignore[method-assign]
    undone = kernelized.undo()
    assert not undone["bit_identical"] and undone["difference"] > 0
    kernelized.twin = None  # its claim on the process's functions goes with it


def test_the_outcome_says_that_a_backend_was_opted_in_and_why(outcome: Outcome) -> None:
    refused = [{"backends": [], "reason": "it installs nothing on this machine"}]
    opted_in = " ".join(replace(outcome, backends=("inductor",), asked=False, refused=refused).how_served())
    assert "Tried the default mapping: it installs nothing on this machine." in opted_in
    assert "the opt-in backend inductor serves here: kernelize() alone would change nothing" in opted_in
    nothing = replace(outcome, report=_with_rows(outcome, state="kept"), refused=refused)
    assert "both runs below are the original" in " ".join(nothing.how_served())


# --- processes, text, memory, plots -----------------------------------------------------------------------------------


def test_a_failing_worker_says_why_and_a_dead_one_too() -> None:
    with Worker("original", text="too short", device="cpu") as process:
        with pytest.raises(WorkerFailed, match="original training failed: ValueError: the text has 9 bytes") as raised:
            process.ask("prepare")
        assert "Traceback" in raised.value.trace
        process._process.kill()
        process._process.wait()
        with pytest.raises(WorkerFailed, match="exit code -9"):
            process.ask("prepare")


def test_a_failed_training_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*given: Any) -> Outcome:
        raise WorkerFailed("the original training failed: OSError", "Traceback: here")

    monkeypatch.setattr(command, "train_both", fail)
    result = CliRunner().invoke(app, ["demo", "--html", str(tmp_path / "x.html")])
    assert result.exit_code == 1
    assert "twinkle-kernel: the original training failed" in result.stderr and "Traceback: here" in result.stderr


def test_an_installed_package_has_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    in_checkout = {document.name for document in text.documents()}
    assert "README.md" in in_checkout
    monkeypatch.setattr(text, "checkout", lambda: None)
    installed = {document.name: document.text for document in text.documents()}
    assert "Apache License" in installed["LICENSE"]
    assert text.__doc__ is not None and text.__doc__.strip() in installed["docstrings of twinkle.commands.demo/text.py"]
    assert sum(map(len, installed.values())) > 50_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't let a process start its peak again")
def test_peak_memory_is_that_of_the_time_since_the_reset() -> None:
    # In a fresh process: memory that earlier tests left to the allocator would hide what is taken here.
    program = (
        "import torch\n"
        "from twinkle.commands.demo.memory import PeakMemory\n"
        "def take(megabytes): torch.ones(megabytes << 20, dtype=torch.uint8)\n"
        "take(96)\n"
        "memory = PeakMemory('cpu')\n"
        "for megabytes in (0, 64):\n"
        "    memory.reset()\n"
        "    take(megabytes)\n"
        "    read = memory.read()\n"
        "    print((read['peak'] - read['before']) >> 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    quiet, taken = map(int, done.stdout.split())
    assert quiet < 16 and 60 <= taken < 90, done.stderr


def test_sparkline_goes_from_the_lowest_to_the_highest_bar() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, ASCII_BARS) == "_+@"
    assert sparkline([2.0, 2.0], 2.0, 2.0, ASCII_BARS) == "__"
    assert downsampled([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0] and downsampled([1.0], 40) == [1.0]


@pytest.mark.parametrize("values", [[1.0, 0.5, 0.25], [3.0] * 4, [0.0, 1e-7, 0.0], [float("nan"), 2.0], [0.0, 0.0]])
@pytest.mark.parametrize("log", [False, True])
def test_curves_stay_inside_the_plot(values: list[float], log: bool) -> None:
    series = [Series("a", "original", values), Series("b", "kernelized", values, dots=True)]
    reader = Reader(line_plot("title", series, log=log))
    points = [point for tag, a in reader.tags if tag == "polyline" for point in (a["points"] or "").split()]
    points += [f"{a['cx']},{a['cy']}" for tag, a in reader.tags if tag == "circle"]
    assert len(points) == 2 * sum(value == value for value in values)
    for x, y in (map(float, point.split(",")) for point in points):
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
