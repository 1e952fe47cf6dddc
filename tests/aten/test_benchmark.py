"""The calls that are timed, what is timed of them, and what ``install("auto")`` makes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.aten.conftest import INTERPRETED, SIMULATED, TRITON
from tests.aten.uses import USES
from twinkle.aten import Home, Profile, RegistrationError, catalog, install, routes
from twinkle.aten.harness.cases import benchmark_cases
from twinkle.aten.registration import active
from twinkle.aten.serving import Serving
from twinkle.aten.spec import OperatorSpec
from twinkle.bench import aten, clocks
from twinkle.bench.aten import NATIVE, PEER, ROUTED, loses, measure, wins
from twinkle.bench.results import Result

TOGETHER = {name for name in USES if catalog.operator(name).caution is None}
WITHIN = {name for name in TOGETHER if catalog.operator(name).called_within is not None}
SIZES = ("accelerator", "cpu", "quick")
BRIEF: dict[str, Any] = {"size": "quick", "rounds": 3, "seconds": 0.1, "peer": False}


interpreted_takes_long = pytest.mark.skipif(INTERPRETED, reason="who is slow is the same, and takes longer")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device has no events: its work is done when a call returns."""
    if SIMULATED:
        monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: clocks.CpuClock())
        monkeypatch.setattr(clocks, "host_clock_for", lambda device: None)


# --- the calls --------------------------------------------------------------------------------------------------------


def test_every_operator_has_calls_in_three_sizes(registrable: OperatorSpec) -> None:
    spec = registrable
    listed = {size: list(benchmark_cases(spec, size)) for size in SIZES}
    kinds = [[(case.name, case.dtype, list(case.described)) for case in cases] for cases in listed.values()]
    assert kinds[0] == kinds[1] == kinds[2]
    assert len({(name, dtype) for name, dtype, _ in kinds[0]}) == len(kinds[0]) >= 2
    assert any(case.name.endswith("/small") for case in listed["quick"]), "what does a call cost at least?"


def test_the_kernels_take_them(registrable: OperatorSpec, chip: Profile) -> None:
    """Each of them is taken by one of the operator's kernels; a layout is the same in all sizes."""
    for size in ("cpu", "quick"):
        for case in benchmark_cases(registrable, size):
            refusals = [
                Serving(registrable, chip.found, level).refusal(case.values(chip.device))
                for level in registrable.kernels
            ]
            assert None in refusals, (case.name, refusals)


# --- what is timed ----------------------------------------------------------------------------------------------------


def test_native_and_ours_in_turns(clone: OperatorSpec, chip: Profile) -> None:
    rows = {row.who: row for row in measure(clone, chip.found, **BRIEF) if row.case == "aten/clone/small"}
    level = Serving(clone, chip.found).level
    assert list(rows) == [NATIVE, level, f"{level}, direct"]
    assert all(row.ms and row.samples == 3 and row.figures["traffic_mb"] == 0.001 for row in rows.values())
    assert active() == []


def test_a_sample_of_ours_is_taken_while_it_is_registered_and_no_other(
    clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    right = clocks.interleaved

    def watched(calls: dict[str, clocks.Call], *args: Any, **options: Any) -> Any:
        def watch(who: str, call: clocks.Call) -> clocks.Call:
            return lambda: (seen.append((who, bool(active()))), call())[1]

        return right({who: watch(who, call) for who, call in calls.items()}, *args, **options)

    monkeypatch.setattr(clocks, "interleaved", watched)
    list(measure(clone, chip.found, **BRIEF))
    assert {who for who, _ in seen} == {
        NATIVE,
        *(f"{Serving(clone, chip.found).level}{end}" for end in ("", ", direct")),
    }
    assert all(registered is (who in ("torch", "triton")) for who, registered in seen)


def test_what_holds_while_a_call_is_timed_is_not_timed() -> None:
    order: list[str] = []

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        time.sleep(0.01)
        order.append("in")
        yield
        order.append("out")

    calls: dict[str, clocks.Call] = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    clock = clocks.CpuClock(shortest_s=0)
    samples = clocks.interleaved(calls, clock, rounds=3, seconds=0, warm_up=1, within={"a": slow})
    assert max(samples["a"]) < 5
    text = " ".join(order)
    assert text.split(" b")[0] == "in a a out" and text.count("in" + 11 * " a" + " out") == 3, (
        "a warm-up and how long it takes; three rounds, each with ten calls before the one that counts"
    )


def test_on_an_accelerator_the_host_is_timed_too(
    clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "host_clock_for", clocks.SubmitClock)
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: clocks.CpuClock())
    assert all(row.host_us and row.ms for row in measure(clone, chip.found, **BRIEF))


def test_what_an_override_costs_that_only_delegates(clone: OperatorSpec, chip: Profile) -> None:
    """Nothing of it is left, and nothing of ours takes part."""
    before = repr(torch.library.get_kernel(clone.overload, chip.found.dispatch_key))
    with aten.delegating(clone, chip.found):
        assert "bench" in repr(torch.library.get_kernel(clone.overload, chip.found.dispatch_key))
        assert torch.ones(3, device=chip.device).clone().tolist() == [1.0] * 3
    assert repr(torch.library.get_kernel(clone.overload, chip.found.dispatch_key)) == before
    rows = [row for row in measure(clone, chip.found, **BRIEF, floor=True) if row.who == aten.FLOOR]
    assert len(rows) == len(list(benchmark_cases(clone, "quick"))) and all(row.ms for row in rows)


def test_a_call_that_is_routed_to_native_is_timed_as_users_get_it(
    clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside our kernel, which is no win there, however fast it is."""

    def found(operator: str, work: routes.Work, platform: Any, level: str) -> routes.Routes | None:
        return None if routes._every_size else routes.Routes(work, {"contiguous": None, "transposed": 1, "gaps": 1})

    monkeypatch.setattr("twinkle.aten.modes.routes_of", found)
    monkeypatch.setattr(routes, "_every_size", False)
    rows = list(measure(clone, chip.found, **BRIEF))
    routed = {row.case for row in rows if row.who == ROUTED}
    ours = {row.case for row in rows if row.who in ("torch", "triton") and row.ms}
    assert "aten/clone/contiguous" in routed and "aten/clone/transposed" in ours - routed
    assert routed < ours
    times = {"torch": 0.0, "triton": 0.0}
    fast = [replace(row, ms=dict.fromkeys(("p20", "p50", "p80"), times.get(row.who, 1.0))) for row in rows]
    won = {win.split()[0] for win in wins(fast)}
    assert won == ours - routed


@pytest.mark.skipif(not TRITON, reason="Triton doesn't run on this device")
def test_in_another_mode_others_serve(clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its Triton kernel alone, no call is routed: each counts, won or lost."""
    everything_is_native = lambda operator, work, platform, level: routes.Routes(work, None)  # noqa: E731
    monkeypatch.setattr("twinkle.aten.modes.routes_of", everything_is_native)
    rows = list(measure(clone, chip.found, mode="triton", **BRIEF))
    assert "triton" in {row.who for row in rows if row.ms} and ROUTED not in {row.who for row in rows}


def test_a_wrong_kernel_is_not_timed(clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    level = Serving(clone, chip.found).level
    module = __import__(f"ops.clone.kernel.{level}_level", fromlist=["*"])
    monkeypatch.setattr(module, f"clone_{level}", lambda x, memory_format: torch.zeros_like(x))
    rows = [row for row in measure(clone, chip.found, **BRIEF) if row.who != NATIVE]
    assert rows and all(row.ms is None and "wrong result: " in row.note for row in rows)


def test_an_operator_without_calls_has_a_row_that_says_so(clone: OperatorSpec, chip: Profile, tmp_path: Any) -> None:
    (row,) = measure(replace(clone, home=Home("ops.clone", tmp_path)), chip.found, **BRIEF)
    assert (row.ms, row.note) == (None, "there is no benchmark.yaml")


def test_too_little_memory_is_a_row(clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(aten._Timed, "_problem", full)
    assert {row.note for row in measure(clone, chip.found, **BRIEF)} == {"the device's memory is too small for it"}


def test_a_peer_that_cannot_run_is_a_row(clone: OperatorSpec, chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise RuntimeError("no device of its own")
        yield

    gems: Callable[[], Any] = lambda: broken  # noqa: E731
    monkeypatch.setattr(aten, "_flag_gems", gems)
    rows = [row for row in measure(clone, chip.found, **{**BRIEF, "peer": True}) if row.who == PEER]
    assert {row.note for row in rows} == {"calling it raised RuntimeError: no device of its own"}
    monkeypatch.setattr(aten, "_flag_gems", lambda: contextlib.nullcontext)
    rows = [row for row in measure(clone, chip.found, **{**BRIEF, "peer": True}) if row.who == PEER]
    assert rows and all(row.ms for row in rows)


def test_who_wins_by_more_than_the_noise() -> None:
    def row(who: str, p20: float, p80: float, case: str = "aten/clone/small") -> Result:
        return Result(case, who, "64", "float32", {"p20": p20, "p50": (p20 + p80) / 2, "p80": p80}, samples=3)

    assert wins([row(NATIVE, 2, 3), row("triton", 1, 1.9)]) == ["aten/clone/small float32"]
    assert wins([row(NATIVE, 2, 3), row("cambricon", 1, 1.9)]) == ["aten/clone/small float32"], "a platform's kernel"
    assert wins([row(NATIVE, 2, 3), row("triton", 1, 2.1)]) == []
    assert wins([row(NATIVE, 2, 3), row(PEER, 1, 1)]) == [], "it isn't ours"
    assert wins([row(NATIVE, 2, 3), row("triton, direct", 1, 1)]) == [], "it isn't what users get"
    assert wins([row(NATIVE, 2, 3), Result("aten/clone/small", "torch", "64", "float32", note="refused")]) == []


def test_who_loses_by_more_than_the_noise() -> None:
    def row(who: str, p20: float, p80: float) -> Result:
        return Result("aten/clone/small", who, "64", "float32", {"p20": p20, "p50": p20, "p80": p80}, samples=3)

    assert loses([row(NATIVE, 2, 3), row("triton", 3.1, 4)]) == ["aten/clone/small float32"]
    assert loses([row(NATIVE, 2, 3), row("triton", 2.9, 4)]) == []
    assert loses([row(NATIVE, 2, 3), row("triton", 4, 4), row(ROUTED, 4, 4)]) == [], "nobody gets it"


def test_what_a_call_costs_the_host_counts_where_that_is_longer() -> None:
    def row(who: str, ms: float, host_us: float) -> Result:
        times, host = (dict.fromkeys(("p20", "p50", "p80"), time) for time in (ms, host_us))
        return Result("aten/silu/small", who, "64", "float32", times, host, samples=3)

    rows = [row(NATIVE, 0.006, 10), row("triton", 0.004, 20)]
    assert wins(rows) == [] and loses(rows) == ["aten/silu/small float32"]
    assert wins([row(NATIVE, 0.03, 10), row("triton", 0.025, 20)]) == ["aten/silu/small float32"]


# --- install("auto") --------------------------------------------------------------------------------------------------


class Told:
    """A clock by which calls take so long while one of some operators is registered, and two milliseconds else."""

    def __init__(self, fast: set[str], ms: float = 1.0) -> None:
        self.fast, self.ms = fast, ms

    def repeats(self, call: clocks.Call) -> int:
        return 1

    def start(self, call: clocks.Call, repeats: int) -> Callable[[], float]:
        call()
        ms = self.ms if {registration.operator for registration in active()} & self.fast else 2.0
        return lambda: ms

    def wait(self) -> None:
        pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "size_for", lambda device: "quick")


@interpreted_takes_long
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fast", [{"clone", "dropout"}, set()])
def test_auto_installs_what_wins_somewhere(fast: set[str], chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: Told(fast))
    monkeypatch.setattr(clocks, "host_clock_for", lambda device: None)
    with install("auto", platform=chip.platform) as installed:
        assert set(installed.registrations) == fast
        assert set(installed.left_out) == TOGETHER - fast
        measured = {name: str(why) for name, why in installed.left_out.items() if name not in WITHIN}
        assert all("faster than PyTorch's on none of" in why for why in measured.values())
        assert {registration.operator for registration in active()} == fast
        shown = repr(installed)
    assert active() == [] and shown.startswith(f"<Installation of {', '.join(sorted(fast)) or 'nothing'}; left out: ")


def test_auto_leaves_out_what_pytorch_calls_within_others(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast its kernel is. Each ``to`` is a call of ``copy_``, and no call of it in a program."""
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: Told({"copy_"}))
    monkeypatch.setattr(catalog, "chosen", lambda: ["copy_"])
    assert {"copy_"} == WITHIN
    with install("auto", platform=chip.platform) as installed:
        assert "PyTorch calls it within to, in every conversion" in str(installed.left_out["copy_"])
        torch.ones(3, device=chip.device).to(torch.float64)
        assert active() == []
    with install("copy_", platform=chip.platform) as installed:
        torch.ones(3, device=chip.device).to(torch.float64)
        assert installed.registrations["copy_"].counter["n"] >= 1  # a simulated device makes more copies


@interpreted_takes_long
@pytest.mark.usefixtures("quick")
def test_auto_leaves_out_what_loses_somewhere(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has a clock of its own: the first one's says that ours is fast, the others' that it is slow."""
    told = iter([Told({"clone"})])
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: next(told, Told({"clone"}, ms=3.0)))
    monkeypatch.setattr(clocks, "host_clock_for", lambda device: None)
    monkeypatch.setattr(catalog, "chosen", lambda: ["clone"])
    with install("auto", platform=chip.platform) as installed:
        assert "faster than PyTorch's elsewhere, is slower on aten/clone/" in str(installed.left_out["clone"])


@interpreted_takes_long
@pytest.mark.usefixtures("quick")
def test_auto_judges_an_operator_in_its_mode(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's own kernel serves every call, nothing is gained by ours, however fast it is."""
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: Told({"clone"}))
    monkeypatch.setattr(clocks, "host_clock_for", lambda device: None)
    monkeypatch.setattr(catalog, "chosen", lambda: ["clone"])
    with install("auto", platform=chip.platform) as installed:
        assert set(installed.registrations) == {"clone"}
    with install("auto", platform=chip.platform, modes={"clone": "native"}) as installed:
        assert "native serves it: native-mode" in str(installed.left_out["clone"])


@interpreted_takes_long
@pytest.mark.usefixtures("quick")
def test_auto_measures_this_machine(chip: Profile) -> None:
    with install("auto", platform=chip.platform) as installed:
        assert {*installed.registrations, *installed.left_out} == TOGETHER


@interpreted_takes_long
@pytest.mark.usefixtures("quick")
def test_auto_leaves_out_what_is_wrong_or_has_no_calls(
    chip: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(clocks, "clock_for", lambda *_, **__: Told(set(catalog.names())))
    monkeypatch.setattr(clocks, "host_clock_for", lambda device: None)
    right = catalog.operator
    unlisted = replace(right("clone"), home=Home("ops.clone", tmp_path))
    monkeypatch.setattr(catalog, "operator", lambda name: unlisted if name == "clone" else right(name))
    with install("auto", platform=chip.platform) as installed:
        assert set(installed.left_out) == {"clone"} | WITHIN
        assert "there is no benchmark.yaml" in str(installed.left_out["clone"])


def test_auto_on_a_platform_that_is_not_here() -> None:
    with pytest.raises(RegistrationError, match="no kunlunxin .cuda. on this machine: the package torch_xmlir"):
        install("auto", platform="kunlunxin")
    with pytest.raises(RegistrationError, match="unknown platform 'cpv'.*did you mean 'cpu'"):
        install("auto", platform="cpv")
    assert active() == []


def test_auto_without_the_package_for_the_lists(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RegistrationError, match=r"PyYAML is not installed \(pip install 'twinkle-kernel\[aten\]'\)"):
        install("auto", platform=chip.platform)
