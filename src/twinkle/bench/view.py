"""What an op benchmark measured, as tables and sentences for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinkle import document
from twinkle.bench.results import EVERYBODY, ORIGINAL, Result, medians, significant
from twinkle.document import GAP, Bar, BarChart, Heading, Part, Points, Text

PASSES = {"f": "f", "fb": "f+b"}
NOISE = 0.03
"""Two medians closer than this count as equal."""

LEGEND = "f: forward, f+b: forward and backward; (2x): twice as fast as hf; *: what the default mapping takes"
HOST = "small tensors: microseconds that a call costs on the host"
CHART = "right of the line: faster than hf, left of it: slower; the bar: the geometric mean, thin line: least to most"
LIMIT = "limit: the time that the memory traffic takes at the speed of a copy"


class Cell(NamedTuple):
    """A cell's text; whether it is the best of its line, and whether the default mapping takes that candidate."""

    text: str
    best: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class Table:
    """One op's figures, a column per candidate.

    Attributes:
        op: its name, figures in ms; or nothing for the host's time of all small cases, in microseconds.
        columns: the header.
        labels: how many columns at the left say what was measured.
    """

    op: str
    columns: tuple[str, ...]
    lines: list[tuple[Cell, ...]]
    labels: int


def tables(results: Iterable[Result], copy_gb_per_s: float | None) -> list[Table]:
    """A table per op, and one of the host's time for all small cases.

    Args:
        copy_gb_per_s: shown is the time that the unavoidable traffic takes at this speed; None: no such column.
    """
    groups: dict[str, list[tuple[tuple[str, str, str], dict[str, Result]]]] = {}
    for key, rows in medians(results).items():
        small = any(row.host_us for row in rows.values())
        groups.setdefault("" if small else key[0].split("/")[0], []).append((key, rows))
    host = groups.pop("", None)
    found = [_table(op, group, copy_gb_per_s) for op, group in groups.items()]
    return [*found, _table("", host, None)] if host else found


def _table(
    op: str, group: Sequence[tuple[tuple[str, str, str], dict[str, Result]]], copy_gb_per_s: float | None
) -> Table:
    whos = list(dict.fromkeys(who for _, rows in group for who in rows))
    lines = []
    for (case, shape, dtype), rows in group:
        name, variant, direction = case.split("/")
        labels = [variant if op else f"{name}/{variant}", shape, dtype, PASSES.get(direction, direction)]
        line = [Cell(text) for text in labels]
        if copy_gb_per_s:
            traffic = rows[ORIGINAL].figures.get("traffic_mb") if ORIGINAL in rows else None
            line.append(Cell(significant(traffic / copy_gb_per_s) if traffic else "-"))
        line += [_cell(who, rows, host=not op) for who in whos]
        lines.append(tuple(line))
    columns = ("variant" if op else "op", "shape", "dtype", "pass", *(["limit"] if copy_gb_per_s else []), *whos)
    return Table(op, columns, lines, 4)


def _cell(who: str, rows: dict[str, Result], *, host: bool) -> Cell:
    if who not in rows:
        return Cell("-")
    times = {name: time_of(row, host) for name, row in rows.items()}
    text, original = significant(times[who]), times.get(ORIGINAL)
    floor = bool(rows[who].figures.get("floor"))
    if original and who != ORIGINAL and not floor:
        text += f" ({factor(original / times[who])})"
    best = min(time for name, time in times.items() if not rows[name].figures.get("floor"))
    return Cell(text, not floor and times[who] == best, rows[who].chosen)


def time_of(row: Result, host: bool) -> float:
    """The median: microseconds on the host, or milliseconds until it is done."""
    times = row.host_us if host else row.ms
    assert times is not None
    return times["p50"]


def factor(value: float) -> str:
    """``0.8712`` -> ``0.87x``, ``14.72`` -> ``14.7x``."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x"


QUICK = (
    "A quick run shows that everything runs. Its tensors are so small that the figures say nothing about what a model "
    "gains, so nothing is concluded from them."
)


def parts(results: Sequence[Result], copy_gb_per_s: float | None, *, quick: bool = False) -> Iterator[Part]:
    """Everything: a table per op, who was not measured and why, and how the default mapping did.

    Args:
        copy_gb_per_s: see :func:`tables`.
        quick: whether the sizes were toys, from which nothing follows.
    """
    found = tables(results, copy_gb_per_s)
    for one in found:
        yield Heading(f"{one.op}, ms" if one.op else HOST)
        if one.op and not quick:
            yield from _chart(results, one.op)
        cells = [[cell.text + "*" * cell.chosen for cell in line] for line in one.lines]
        yield document.Table(one.columns, cells, labels=one.labels)
        yield GAP
    if found:
        yield Text("; ".join(filter(None, [LEGEND, LIMIT if copy_gb_per_s else ""])), "dim")
        yield GAP
    reasons = why_not(results)
    if reasons:
        yield Heading("not measured")
        points = []
        for (who, why), ops in reasons.items():
            cases = sum((result.who, result.note) == (who, why) for result in results)
            points.append((f"{f'{cases} more cases of' if who == EVERYBODY else f'{who} for'} {', '.join(ops)}", why))
        yield Points(points)
        yield GAP
    yield from map(Text, [QUICK] if quick else verdict(results))


def _chart(results: Sequence[Result], op: str) -> Iterator[BarChart]:
    """How much faster than the original each candidate of an op is; small cases are left out."""
    factors: dict[str, list[float]] = {}
    for (case, _, _), rows in medians(results).items():
        small = any(row.host_us for row in rows.values())
        if case.split("/")[0] == op and not small and ORIGINAL in rows:
            original = time_of(rows[ORIGINAL], host=False)
            for who, row in rows.items():
                if who != ORIGINAL and not row.figures.get("floor"):
                    factors.setdefault(who, []).append(original / time_of(row, host=False))
    bars = []
    for who, found in factors.items():
        mean = statistics.geometric_mean(found)
        text = f"{factor(mean)} ({factor(min(found))} .. {factor(max(found))})"
        bars.append(Bar(who, mean - 1, text, min(found) - 1, max(found) - 1, "red" if mean < 1 else ""))
    if bars:
        yield BarChart("Times as fast as hf, over the cases that each was measured in", bars, CHART)


def why_not(results: Iterable[Result]) -> dict[tuple[str, str], list[str]]:
    """``(who, reason)`` -> the ops for which a candidate was not measured, in at least one case."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.note and not result.ms:
            ops = found.setdefault((result.who, result.note), [])
            if (op := result.case.split("/")[0]) not in ops:
                ops.append(op)
    return found


def verdict(results: Iterable[Result]) -> list[str]:
    """How the default mapping's choices did: sentences for people."""
    by_size: dict[bool, list[tuple[str, float, float]]] = {False: [], True: []}
    for (case, shape, dtype), rows in medians(results).items():
        small = any(row.host_us for row in rows.values())
        times = {who: time_of(row, small) for who, row in rows.items() if not row.figures.get("floor")}
        picked = next((who for who, row in rows.items() if row.chosen), None)
        if picked is not None and ORIGINAL in times:
            of_original, of_best = times[ORIGINAL] / times[picked], min(times.values()) / times[picked]
            name, _, direction = case.rpartition("/")
            what = f"{picked} for {name} {shape} {dtype} {PASSES.get(direction, direction)}"
            by_size[small].append((what, of_original, of_best))
    sentences = []
    for small, found in by_size.items():
        if not found:
            continue
        fastest = sum(of_best >= 1 - NOISE for _, _, of_best in found)
        slower = [f"{what} ({factor(of_original)})" for what, of_original, _ in found if of_original < 1 - NOISE]
        what = "On small tensors, where the host's work is all there is, w" if small else "W"
        sentences.append(
            f"{what}hat the default mapping takes is the fastest, or within {NOISE:.0%} of it, in {fastest} of "
            f"{len(found)} cases{'' if slower else ', and never slower than the original'}."
        )
        more = f" and {len(slower) - 4} more" if len(slower) > 4 else ""
        sentences += [f"Slower than the original: {', '.join(slower[:4])}{more}."] if slower else []
    return sentences
