"""What came out of the demo, and whether it is as it must be. Pure data and arithmetic: both views read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from twinkle.commands.console import count, size

ULP = 2.0**-23
"""The unit in the last place of fp32, relative."""


@dataclass
class Run:
    """One measured training.

    Attributes:
        losses, seconds: of each step.
        first_call: seconds of the first forward and backward, before the training; a compiler works then.
        memory: ``before``, ``peak`` in bytes (or None), and ``kind``.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_call: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)

    def add(self, step: dict[str, float]) -> None:
        self.losses.append(step["loss"])
        self.seconds.append(step["seconds"])

    @property
    def step_seconds(self) -> float:
        """The median, which a busy machine disturbs least."""
        return median(self.seconds)


@dataclass(frozen=True)
class Check:
    """One promise: its name, whether it was kept, and the figures."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class StepJudgement:
    """How far the kernelized loss of one step is from the original's mean, and how far it may be."""

    distance: float
    allowed: float

    @property
    def used(self) -> float:
        return self.distance / self.allowed


def judge_losses(kernelized: list[float], orders: list[list[float]]) -> list[StepJudgement]:
    """Judges a loss curve by the spread of the original's own.

    Args:
        kernelized: losses by step.
        orders: the original's losses in several summation orders, of the same steps.

    Returns:
        for each step the distance to the orders' mean, and what is allowed: twice the largest difference between two
        orders up to that step, plus one unit in the last place of the loss.
    """
    judged = []
    spread = 0.0
    for loss, *originals in zip(kernelized, *orders, strict=True):
        mean = sum(originals) / len(originals)
        spread = max(spread, max(originals) - min(originals))
        distance = abs(loss - mean) if loss == loss else float("inf")
        judged.append(StepJudgement(distance, 2 * spread + ULP * abs(mean)))
    return judged


@dataclass
class Outcome:
    """Everything that the demo found out.

    Attributes:
        documents, text_bytes: what was trained on.
        device, device_name, torch: where, and with what.
        parameters, tokens: of the model, and of one step.
        steps_asked: how many steps were wanted; fewer ran when the time was up.
        original, kernelized: the two measured trainings.
        orders: the original's losses in further summation orders.
        plan: the report of the default mapping on this machine.
        backends: the opt-in chain that served instead; empty for the default mapping.
        asked: whether the user named the chain.
        refused: what was tried before: ``backends`` and ``reason``.
        report: the report after the training.
        first_step: loss, logits and gradients of the first batch, and the share of the allowed error that each uses.
        undo: see ``Kernelized.undo`` in the worker.
    """

    documents: list[str]
    text_bytes: int
    device: str
    device_name: str
    torch: str
    parameters: int
    tokens: int
    steps_asked: int
    original: Run
    kernelized: Run
    orders: list[list[float]]
    plan: dict[str, Any]
    backends: tuple[str, ...]
    asked: bool
    refused: list[dict[str, Any]]
    report: dict[str, Any]
    first_step: list[tuple[str, float]]
    undo: dict[str, Any]

    @property
    def steps(self) -> int:
        return len(self.original.losses)

    @property
    def installed(self) -> list[dict[str, Any]]:
        """The rows of kernels that served."""
        return [row for row in self.report["rows"] if row["state"] == "installed"]

    @property
    def judged(self) -> list[StepJudgement]:
        """Of every step; the first is judged by its tensors instead."""
        return judge_losses(self.kernelized.losses, [self.original.losses, *self.orders])

    @property
    def speedup(self) -> float:
        """How many times as fast the kernelized step is."""
        return self.original.step_seconds / self.kernelized.step_seconds

    def checks(self) -> list[Check]:
        """Every promise that this run shows."""
        return [self._called(), self._first_step(), self._later_steps(), self._learned(), self._undone()]

    def passed(self) -> bool:
        return all(check.passed for check in self.checks())

    def _called(self) -> Check:
        served = [row for row in self.installed if row["calls"] or row["compiled"]]
        others = [row for row in self.installed if row not in served]
        silent = [row["target"] for row in others if not row["fallbacks"]]
        declined = [f"{row['target']}: {', '.join(row['fallbacks'])}" for row in others if row["fallbacks"]]
        fallbacks = sum(sum(row["fallbacks"].values()) for row in self.installed)
        calls = sum(row["calls"] for row in self.installed)
        sites = sum(row["instances"] or 0 for row in self.installed)
        detail = f"{counted(sites, 'place')}, {calls} calls served, {fallbacks} left to the original"
        if not self.installed:
            detail = "no kernel could be installed"
        elif silent:
            detail += f"; never called: {', '.join(silent)}"
        if declined:  # a kernel says of each call whether it is for it
            detail += f"; none served of {'; '.join(declined)}"
        return Check("Kernels were installed and called", bool(served) and not silent, detail)

    def _first_step(self) -> Check:
        name, used = max(self.first_step, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
        detail = f"{len(self.first_step)} tensors; the worst, {name}, uses {used:.0%} of the allowed error"
        return Check("Step 1: loss, logits and all gradients agree", used <= 1, detail)

    def _later_steps(self) -> Check:
        worst, step = max((judgement.used, step) for step, judgement in enumerate(self.judged[1:], start=2))
        detail = (
            f"{counted(self.steps - 1, 'step')}; the worst, step {step}, uses {worst:.0%} of what rounding alone may do"
        )
        return Check("Later steps: the losses agree", worst <= 1, detail)

    def _learned(self) -> Check:
        first, last = self.kernelized.losses[0], self.kernelized.losses[-1]
        return Check("The model learns", last < first, f"loss {first:.3f} to {last:.3f} nats a byte")

    def _undone(self) -> Check:
        undo = self.undo
        problems = [
            *undo["not_undone"],
            *(["a module has another class than before"] if not undo["classes_restored"] else []),
            *(["a function is another object than before"] if not undo["functions_restored"] else []),
            *([f"logits differ by {undo['difference']:.3g}"] if not undo["bit_identical"] else []),
        ]
        detail = f"{counted(undo['modules'], 'module')} and {counted(undo['functions'], 'function')} are what they were"
        detail += "; the logits are those of a fresh original with the same weights, bit for bit"
        return Check("Undone", not problems, "; ".join(problems) or detail)

    def how_served(self) -> list[str]:
        """Which mapping served, and why not the default one: sentences."""
        said = []
        for refusal in self.refused:
            what = f"backend {', '.join(refusal['backends'])}" if refusal["backends"] else "the default mapping"
            said.append(f"Tried {what}: {refusal['reason']}.")
        if not self.installed:
            said.append("So nothing was replaced, and both runs below are the original.")
        elif not self.backends:
            said.append("The default mapping serves.")
        elif self.asked:
            said.append(f"The chain {', '.join(self.backends)} serves, as asked.")
        else:
            said.append(
                f"So the opt-in backend {self.backends[0]} serves here: kernelize() alone would change nothing on this "
                f"machine; a mapping has to name {self.backends[0]}."
            )
        return said

    def speed(self) -> list[str]:
        """What the kernels gain, honestly: sentences."""
        if not self.installed:
            return []
        where = "this CPU" if self.device == "cpu" else self.device_name
        # The same batch, one right after the other: a busy moment of the machine decides single steps, not most.
        pairs = list(zip(self.original.seconds, self.kernelized.seconds, strict=True))
        faster = sum(kernelized < original for original, kernelized in pairs) / len(pairs)
        gain = "gain" if faster >= 0.75 else "gain nothing" if faster <= 0.25 else "gain nothing that shows"
        said = [
            f"On {where} the kernels {gain}: {self.speedup:.2f} times the original's tokens per second, "
            f"faster in {faster:.0%} of the steps."
        ]
        extra = self.kernelized.first_call - self.original.first_call
        if extra > 1:
            compiled = (
                f"The first call took {extra:.1f} s longer, to compile; the figures of the steps don't contain it"
            )
            if gain == "gain" and self.speedup > 1:
                steps = extra / (self.original.step_seconds - self.kernelized.step_seconds)
                compiled += f", the gain earns it back after {counted(math.ceil(steps), 'step')}"
            said.append(f"{compiled}.")
        return said

    def figures(self) -> list[tuple[str, str, str]]:
        """(what, original, kernelized), as text."""
        runs = (self.original, self.kernelized)
        rows = [
            ("tokens per second", *(f"{self.tokens / run.step_seconds:,.0f}" for run in runs)),
            ("step, median", *(f"{run.step_seconds * 1000:.0f} ms" for run in runs)),
            ("first call", *(f"{run.first_call:.1f} s" for run in runs)),
            ("peak memory", *(_bytes(run.memory["peak"]) for run in runs)),
            ("of it before the training", *(_bytes(run.memory["before"]) for run in runs)),
            ("loss, last step", *(f"{run.losses[-1]:.6f}" for run in runs)),
        ]
        return [(what, original, kernelized) for what, original, kernelized in rows]

    def setting(self) -> str:
        """Model, device and text in one line."""
        stopped = f" of {self.steps_asked} (the time was up)" if self.steps < self.steps_asked else ""
        return (
            f"Qwen3 with {count(self.parameters)} parameters, bytes as tokens, fp32, on {self.device} "
            f"({self.device_name}, torch {self.torch}); {self.steps} steps{stopped} of {self.tokens} tokens from "
            f"{size(self.text_bytes)} of this project's own texts ({len(self.documents)})"
        )


def counted(number: int, what: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _bytes(number: int | None) -> str:
    return "not measured here" if number is None else size(number)


def downsampled(values: list[float], count: int) -> list[float]:
    """At most ``count`` values: means of neighbours."""
    if len(values) <= count:
        return values
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
