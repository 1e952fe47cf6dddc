"""What the figures of a model's step decide: pure, from the rows of a result file.

In every round the original and all variants take a step in turns, so a variant is judged by the differences within the
rounds, which a drift of the machine hardly touches. The original takes two turns: what it may differ from itself by is
the noise, and nothing smaller counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from twinkle.bench.results import ORIGINAL, Result
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG, OPT_IN_KERNEL_CONFIG, default_chain
from twinkle.kernel.registry import KernelChoice

CASE = "model/"
ORIGINAL_CASE, TOGETHER = f"{CASE}original", f"{CASE}all together"
AGAIN = f"{ORIGINAL} again"

FASTER, SLOWER, NOISE, LIGHTER = "faster", "slower", "within the noise", "less memory"
NOT_CALLED, TOO_FEW, NOT_MEASURED = "not called", "too few rounds", "not measured"

CONFIDENCE = 0.99
"""With so many variants a 95 % interval would be wrong about one of them in every other run."""

LESS = 0.02
"""From this part of the step's memory on, what is saved counts: memory doesn't vary from run to run."""

OPT_IN = {key: choice.op for key, choice in OPT_IN_KERNEL_CONFIG.items()}
"""Logical entries that the default mapping leaves to the user -> their op."""

LEAST_ROUNDS = 8
"""The fewest differences whose median has an interval of that confidence: all of one sign by chance once in 128."""


# --- numbers ----------------------------------------------------------------------------------------------------------


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Between which of the differences their true median lies, with :data:`CONFIDENCE`; None for too few of them.

    By the sign test: it supposes nothing about how they are distributed, and single disturbed rounds don't matter.
    """
    ordered, n = sorted(differences), len(differences)
    outside, rank = 0.0, 0
    while True:  # the k-th smallest and k-th largest miss the median with twice the chance of fewer than k heads
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def difference(slow_ms: Sequence[float], fast_ms: Sequence[float], name: str) -> dict[str, float]:
    """The figures ``NAME_us`` (the median of slow less fast, round by round), ``NAME_low_us`` and ``NAME_high_us``."""
    each = [(slow - fast) * 1e3 for slow, fast in zip(slow_ms, fast_ms, strict=True)]
    found = {f"{name}_us": statistics.median(each)}
    between = interval(each)
    if between is not None:
        found |= {f"{name}_low_us": between[0], f"{name}_high_us": between[1]}
    return {key: round(value, 3) for key, value in found.items()}


def judged(figures: Mapping[str, float], name: str, noise_us: float | None) -> str:
    """Whether a difference counts: one of :data:`FASTER`, :data:`SLOWER`, :data:`NOISE` and :data:`TOO_FEW`."""
    if noise_us is None or f"{name}_low_us" not in figures:
        return TOO_FEW
    if figures[f"{name}_low_us"] > 0 and figures[f"{name}_us"] > noise_us:
        return FASTER
    if figures[f"{name}_high_us"] < 0 and figures[f"{name}_us"] < -noise_us:
        return SLOWER
    return NOISE


# --- what follows -----------------------------------------------------------------------------------------------------


@dataclass
class Conclusions:
    """What a run says.

    Attributes:
        noise_us: by how much the original's step may differ from itself; None where there were too few rounds.
        verdicts: (case, who) -> what became of it; ``less memory`` where the time is within the noise.
        chains: target -> (op, backends): entries for which another order is faster here than the default mapping's.
        without: targets whose entry makes the step slower, whatever serves, and saves no memory.
    """

    noise_us: float | None = None
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    chains: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "noise_us": self.noise_us,
            "verdicts": [{"case": case, "who": who, "verdict": said} for (case, who), said in self.verdicts.items()],
            "mapping": {
                target: {"op": op, "backends": list(backends)} for target, (op, backends) in self.chains.items()
            },
            "without": self.without,
        }


def conclude(results: Iterable[Result]) -> Conclusions:
    """What rows of the cases ``model/…`` say, see :mod:`twinkle.bench.model`."""
    results = list(results)
    original = next((row for row in results if row.case == ORIGINAL_CASE and row.who == ORIGINAL), None)
    again = next((row.figures for row in results if row.who == AGAIN and row.ms), {})
    found = Conclusions()
    if "saved_low_us" in again:
        found.noise_us = max(abs(again["saved_low_us"]), abs(again["saved_high_us"]))
    entries: dict[str, list[Result]] = {}
    for row in results:
        if row.case != ORIGINAL_CASE:
            found.verdicts[row.case, row.who] = _verdict(row, original, found.noise_us)
        if row.case not in (ORIGINAL_CASE, TOGETHER):
            entries.setdefault(row.case, []).append(row)
    for case, rows in entries.items():
        _choose(case.removeprefix(CASE), rows, original, found)
    return found


def less_memory(row: Result, original: Result | None) -> float:
    """By what part of its memory the row's step holds less than the original's; 0 where that isn't known."""
    ours, theirs = (one.figures.get("step_memory_gb", 0.0) if one else 0.0 for one in (row, original))
    return (theirs - ours) / theirs if ours and theirs else 0.0


def _verdict(row: Result, original: Result | None, noise_us: float | None) -> str:
    if not row.ms:
        return NOT_MEASURED
    said = judged(row.figures, "saved", noise_us)
    # To be asked and to decline costs time too.
    idle = not row.figures.get("calls") and row.figures.get("calls_left")
    if idle and said != SLOWER:
        return NOT_CALLED
    return LIGHTER if said == NOISE and less_memory(row, original) >= LESS else said


def _choose(target: str, rows: list[Result], original: Result | None, found: Conclusions) -> None:
    """Adds another chain for an entry, or that it is better left out."""
    usual = next((row for row in rows if row.chosen), None)
    better = [row for row in rows if not row.chosen and row.ms and _beats(row, usual, found)]
    if better:
        best, choice = max(better, key=lambda row: row.figures["saved_us"]), choice_of(target)
        others = {who for row in rows if row.ms and row is not best for who in row.who.split("+")}
        found.chains[target] = (choice.op, reordered(choice.backends, best.who, others))
    elif usual and found.verdicts[usual.case, usual.who] == SLOWER and less_memory(usual, original) < LESS:
        found.without.append(target)


def choice_of(target: str) -> Any:
    """What the default mapping says about a target; of an entry of :data:`OPT_IN`, all that its op has."""
    if target in OPT_IN and target not in DEFAULT_KERNEL_CONFIG:
        return KernelChoice(OPT_IN[target], default_chain(OPT_IN[target]))
    return DEFAULT_KERNEL_CONFIG[target]


def _beats(row: Result, usual: Result | None, found: Conclusions) -> bool:
    """Whether a backend is faster than the original, and than what the mapping takes."""
    faster = found.verdicts[row.case, row.who] == FASTER
    if usual is None or not usual.ms:
        return faster
    return faster and judged(row.figures, "gain", found.noise_us) == FASTER


def reordered(chain: Sequence[str], best: str, others: Set[str]) -> tuple[str, ...]:
    """The chain with ``best`` before the first of the others, and otherwise as it is: of those nothing was shown.

    Args:
        others: backends that can serve as well. Where the best comes before all of them already, those that served
            together with it are left out; where neither it nor they are in the chain, it goes to the end.
    """
    slower = others - {best}
    first = next((backend for backend in chain if backend == best or backend in slower), None)
    if first == best:
        return tuple(backend for backend in chain if backend not in slower)
    rest = [backend for backend in chain if backend != best]
    at = len(rest) if first is None else rest.index(first)
    return (*rest[:at], best, *rest[at:])
