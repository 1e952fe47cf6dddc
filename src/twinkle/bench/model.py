"""What each entry of the default mapping is worth for one model on one machine.

Measured is a whole training step of one and the same model, with one thing at a time switched on in it: for each entry
what the default mapping takes, for each entry each backend of its chain alone, and all entries together. The rows:

- ``model/original``: ``hf``, and ``hf again``, the same once more. What lies between them is the noise; all others are
  compared with the mean of the two.
- ``model/TARGET``: who serves, several backends joined by ``+``; ``chosen`` is what the default mapping takes.
- ``model/all together``: ``default``; with entries that are opt-in ``default+ENTRY`` too.

What follows from them is in :mod:`twinkle.bench.worth`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from twinkle.bench.clocks import Clock, interleaved, synchronize
from twinkle.bench.ops import COMPILED
from twinkle.bench.results import ORIGINAL, Result, measured, percentiles
from twinkle.bench.step import differs, memory_of, timed, training_step
from twinkle.bench.worth import AGAIN, CASE, LEAST_ROUNDS, OPT_IN, ORIGINAL_CASE, TOGETHER, choice_of, difference
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, registry
from twinkle.kernel.apply import apply_plan
from twinkle.kernel.plan import Plan, make_plan
from twinkle.kernel.report import report
from twinkle.kernel.report_text import short
from twinkle.kernel.rows import Row
from twinkle.kernel.undo import unkernelize
from twinkle.naming import dtype_name
from twinkle.reasons import Reason

DEFAULT = "default"
FAILED = "wrong: "
"""How the note of a variant begins that raised, or computes something else than the original."""

INTERRUPTED = "interrupted before it was measured"
OUT_OF_MEMORY = "the device's memory is too small for it"
ROUNDS, MOST_ROUNDS = 20, 200
"""How many are usual: the interval of a median then leaves three of them out at either end; and how many at most."""

ENOUGH_MS, MOST_STEPS = 50.0, 5
"""So long, or so many steps, a sample of short steps takes; it is their median."""

LONG_MS = 1000.0
"""From here on what was switched on isn't warmed up by a step: what that costs is nothing beside the step."""


class OriginalFailed(Exception):
    """The original's step raised, so there is nothing to compare with; the message says what."""


@dataclass(eq=False)
class Variant:
    """The model with something switched on in it.

    Attributes:
        case, who, chosen: of its row.
        plan: what is installed; None for the original.
        step_ms: about how long a step takes.
        compiled: whether a compiler serves, so that the first step after switching it on takes longer.
        done_ms, submitted_ms: one sample per round.
        figures: what else was measured.
        note: for the row.
        out: whether it isn't timed, for the reason in ``note``.
    """

    case: str
    who: str
    plan: Plan | None = None
    chosen: bool = False
    step_ms: float = 0.0
    compiled: bool = False
    done_ms: list[float] = field(default_factory=list)
    submitted_ms: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""
    out: bool = False

    @property
    def label(self) -> str:
        return f"{short(self.case.removeprefix(CASE))} {self.who}"

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Within it the model is the variant. The plan is made once: a kernel that compiles stays the same object."""
        if self.plan is None:
            yield
            return
        apply_plan(self.plan)
        try:
            yield
        finally:
            unkernelize(model)


# --- who is measured --------------------------------------------------------------------------------------------------


def variants(model: Any, *, also: Sequence[str] = (), ops: Sequence[str] = ()) -> list[Variant]:
    """The original twice, for each entry what serves, and all entries together where there are several.

    Where nothing can be installed there is the original alone.

    Args:
        also: backends that are measured alone although the default chain doesn't name them, and entries of
            :data:`~twinkle.bench.worth.OPT_IN`.
        ops: only entries of these; all when empty.
    """
    installed: dict[str, list[Row]] = {}
    for row in make_plan(model).rows():
        if row.state not in ("unused", "missing", "overridden") and (not ops or row.op in ops):
            installed.setdefault(row.target, []).extend([row] if row.state == "installed" else [])
    asked_for = [target for target in OPT_IN if target in also and target not in installed]
    found = [Variant(ORIGINAL_CASE, ORIGINAL)]
    for target, rows in {**installed, **{target: [] for target in asked_for}}.items():
        found += _of_entry(model, target, rows, also)
    usual = {target: DEFAULT_KERNEL_CONFIG[target] for target, rows in installed.items() if rows}
    if len(usual) > 1:
        found.append(Variant(TOGETHER, DEFAULT, make_plan(model, usual), chosen=True))
    more = {target: choice_of(target) for target in asked_for if any(v.case == CASE + target for v in found)}
    if usual and more:
        found.append(Variant(TOGETHER, "+".join((DEFAULT, *more)), make_plan(model, {**usual, **more})))
    if len(found) > 1:  # in the midst of the others, so that it comes after one of them as they do
        found.insert(1 + len(found) // 2, Variant(ORIGINAL_CASE, AGAIN))
    return found


def _of_entry(model: Any, target: str, rows: list[Row], also: Sequence[str]) -> list[Variant]:
    """What the default mapping takes, where it takes anything, and the other backends that can serve the entry."""
    choice, found = choice_of(target), []
    usual = "+".join(dict.fromkeys(str(row.backend) for row in rows))
    if rows:
        found.append(Variant(CASE + target, usual, make_plan(model, {target: choice}), chosen=True))
    extra = [backend for backend in also if backend in registry.backends_of(choice.op)]
    own = [backend for backend in choice.backends if backend != COMPILED]
    for backend in dict.fromkeys((*own, *extra)):
        alone = make_plan(model, {target: KernelChoice(choice.op, (backend,), choice.installer)})
        if backend != usual and any(row.state == "installed" for row in alone.rows()):
            found.append(Variant(CASE + target, backend, alone))
    return found


# --- measuring --------------------------------------------------------------------------------------------------------

Progress = Callable[[str], None]


def measure(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    everyone: Sequence[Variant],
    *,
    seconds: float,
    rounds: int = ROUNDS,
    progress: Progress = lambda label: None,
) -> bool:
    """Fills the variants' samples and figures; returns whether the user had enough of it.

    Args:
        seconds: no further round is started after that, first steps included; at least three are.
        rounds: at most so many.
        progress: called with what comes next.

    Raises:
        OriginalFailed: the original can't take a step on these inputs.
        torch.OutOfMemoryError: there is too little memory for the original's step, or for some variant's later on.
    """
    device = next(model.parameters()).device
    step = partial(training_step, model, inputs)
    begin = time.perf_counter()
    try:
        with _many_compilations():
            for variant in everyone:
                progress(f"first steps: {variant.label}")
                _first_steps(variant, model, step, device, everyone[0])
            left = seconds - (time.perf_counter() - begin)
            clock = _StepClock(model, step, device, progress)
            calls: dict[str, Any] = {str(n): variant for n, variant in enumerate(everyone) if not variant.out}
            interleaved(calls, clock, rounds=rounds, seconds=left, warm_up=0)
    except KeyboardInterrupt:
        return True
    finally:
        model.zero_grad(set_to_none=True)
    return False


def _first_steps(variant: Variant, model: Any, step: Any, device: torch.device, original: Variant) -> None:
    """Whether it runs and computes the same, how often it is called, how long it takes and how much memory it holds."""
    try:
        with variant.on(model):
            loss = float(step())
            variant.figures["loss"] = round(loss, 6)
            if variant.plan is not None:
                _note_calls(variant, report(model).rows)
            if variant.out:
                return
            variant.step_ms, _ = timed(step, device)
            variant.figures |= memory_of(step, model, device)
        why = differs(loss, original.figures["loss"])
        if why is not None:
            variant.out, variant.note = True, f"{FAILED}{why}"
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if variant.plan is None:
            raise error if out_of_memory else OriginalFailed(str(Reason.of_error(error, "failed", "it"))) from error
        reason = Reason.of_error(error, "failed", "a training step")
        variant.out, variant.note = True, OUT_OF_MEMORY if out_of_memory else f"{FAILED}{reason}"


def enough_seconds(everyone: Sequence[Variant]) -> float:
    """About how long as many rounds take as it takes to tell anything, first steps included."""
    seconds = 0.0
    for variant in everyone:
        warm_up = variant.step_ms < LONG_MS or variant.compiled
        seconds += variant.step_ms / 1e3 * (3 + LEAST_ROUNDS * (1 + warm_up))
    return float(math.ceil(seconds / 10) * 10)


def _note_calls(variant: Variant, rows: Sequence[Row]) -> None:
    installed = [row for row in rows if row.state == "installed"]
    if not installed:  # of a logical name only its installer knows whether the model has a place
        variant.out, variant.note = True, f"not installed: {'; '.join(row.why() for row in rows)}"
        return
    variant.compiled = any(row.backend == COMPILED for row in installed)
    variant.figures |= {
        "sites": float(sum(row.instances or 0 for row in installed)),
        "calls": float(sum(row.calls for row in installed)),
        "calls_left": float(sum(sum(row.fallbacks.values()) for row in installed)),
    }
    if variant.case != TOGETHER:
        left = {reason: count for row in installed for reason, count in row.fallbacks.items()}
        variant.note = "; ".join(f"{count} calls a step left to the original: {why}" for why, count in left.items())


class _StepClock(Clock):
    """Samples of steps of a variant, which is switched on for each."""

    def __init__(self, model: Any, step: Any, device: torch.device, progress: Progress) -> None:
        self.model, self.step, self.device, self.progress = model, step, device, progress

    def repeats(self, call: Any) -> int:
        return min(MOST_STEPS, max(1, round(ENOUGH_MS / call.step_ms)))

    def start(self, call: Any, repeats: int) -> Callable[[], float]:
        self.progress(f"round {len(call.done_ms) + 1}: {call.label}")
        with call.on(self.model), _no_collection():
            if call.step_ms < LONG_MS or call.compiled:
                self.step()
            samples = [timed(self.step, self.device) for _ in range(repeats)]
        done, submitted = (percentiles(list(ms))["p50"] for ms in zip(*samples, strict=True))
        call.done_ms.append(done)
        call.submitted_ms.append(submitted)
        return lambda: done

    def wait(self) -> None:
        synchronize(self.device)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection of garbage costs as much as a kernel saves, and hits whoever is there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _many_compilations() -> Iterator[None]:
    """What ``torch.compile`` serves is compiled anew whenever it is switched on: its limits are for other programs."""
    from torch._dynamo import config

    with config.patch(recompile_limit=10_000, accumulated_recompile_limit=100_000):
        yield


# --- rows -------------------------------------------------------------------------------------------------------------


def results(
    everyone: Sequence[Variant], shape: str, dtype: torch.dtype, tokens: int, device: torch.device
) -> list[Result]:
    """The rows of all variants, of the rounds that all of them took part in.

    Args:
        shape: of the batch.
        tokens: in a batch; 0 where there are none.
    """
    rounds = min((len(v.done_ms) for v in everyone if not v.out), default=0)
    usual = {v.case: v for v in everyone if v.chosen and not v.out}
    # Both turns of the original tell more than one. Between them there is the noise.
    first, again = (v.done_ms[:rounds] for v in everyone if v.case == ORIGINAL_CASE)
    original = [statistics.fmean(pair) for pair in zip(first, again, strict=True)]
    rows = []
    for variant in everyone:
        figures, done = dict(variant.figures), variant.done_ms[:rounds]
        if variant.out or rounds < 2:
            note = variant.note if variant.out else INTERRUPTED
            rows.append(Result(variant.case, variant.who, shape, dtype_name(dtype), figures=figures, note=note))
            continue
        fields = measured(done, None if device.type == "cpu" else variant.submitted_ms[:rounds])
        figures |= {"tokens_per_s": round(tokens / fields["ms"]["p50"] * 1e3, 1)} if tokens else {}
        if variant.case != ORIGINAL_CASE:
            figures |= difference(original, done, "saved")
        elif variant.who == AGAIN:
            figures |= difference(first, done, "saved")
        if variant.case in usual and usual[variant.case] is not variant:
            figures |= difference(usual[variant.case].done_ms[:rounds], done, "gain")
        fields |= {"chosen": variant.chosen, "figures": figures, "note": variant.note}
        rows.append(Result(variant.case, variant.who, shape, dtype_name(dtype), **fields))
    return rows
