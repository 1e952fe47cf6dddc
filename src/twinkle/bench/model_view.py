"""What was measured of a model, for people: a table, what follows from it, and a mapping to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from twinkle.bench import worth
from twinkle.bench.results import ORIGINAL, Result, significant, spread
from twinkle.bench.view import factor
from twinkle.bench.worth import CASE, ORIGINAL_CASE, TOGETHER, Conclusions
from twinkle.document import GAP, Bar, BarChart, Code, Part, Table, Text
from twinkle.kernel.report_text import short
from twinkle.layout import paragraph

COLUMNS = ("entry", "backend", "calls", "saved a step, us", "saved a call, us", "memory, MB", "here")
NUMBERS = ("calls", "memory, MB")
STYLES = {
    worth.SLOWER: "red",
    worth.NOISE: "dim",
    worth.NOT_CALLED: "yellow",
    worth.TOO_FEW: "dim",
    worth.NOT_MEASURED: "red",
}
HERE = {
    worth.FASTER: "{share} faster",
    worth.SLOWER: "not worth it ({share} slower)",
    worth.NOISE: "not worth it (noise)",
    worth.LIGHTER: "{memory} less memory",
    worth.NOT_CALLED: "not called",
    worth.TOO_FEW: "too few rounds to tell",
    worth.NOT_MEASURED: "not measured",
}

DOUBT = {
    worth.NOISE: "within the noise",
    worth.LIGHTER: "within the noise",
    worth.NOT_CALLED: "no kernel takes a call of this size",
    worth.TOO_FEW: "too few rounds to tell",
}
RESTLESS = 0.05
"""From this part of a step on, the noise is more than a quiet machine has."""


def parts(results: Sequence[Result], found: Conclusions, *, enough_s: float = 0.0) -> Iterator[Part]:
    """Everything but the header.

    Args:
        enough_s: how many seconds give as many rounds as it takes to tell anything.
    """
    original = next(row for row in results if row.case == ORIGINAL_CASE and row.who == ORIGINAL)
    rows = [row for row in results if row.case != ORIGINAL_CASE]
    yield from map(Text, _about_original(original, found, enough_s))
    yield GAP
    yield from _charts(rows, original, found)
    styles = [STYLES.get(found.verdicts[row.case, row.who], "") for row in rows]
    yield Table(COLUMNS, [cells(row, original, found) for row in rows], NUMBERS, styles, word="here")
    yield from (Text(line, "dim") for line in _legend(rows))
    notes = [f"{name(row)}, {row.who}: {row.note}" for row in rows if row.note]
    if notes:
        yield GAP
        yield from map(Text, notes)
    yield GAP
    yield from map(Text, _outcome(rows, original, found))
    if found.chains or found.without:
        yield GAP
        yield Code(partial(mapping_lines, found))


def _charts(rows: Sequence[Result], original: Result, found: Conclusions) -> Iterator[BarChart]:
    """Time and memory by entry, where they were measured."""
    saved, memory = [], []
    for row in rows:
        text = dict(zip(COLUMNS, cells(row, original, found), strict=True))
        who, figures = f"{text['entry']}, {text['backend']}", row.figures
        if "saved_us" in figures:
            # Of time alone: what holds less memory may still be within the noise.
            idle = found.verdicts.get((row.case, row.who)) == worth.NOT_CALLED
            said = worth.NOT_CALLED if idle else worth.judged(figures, "saved", found.noise_us)
            value, low, high = figures["saved_us"], figures.get("saved_low_us"), figures.get("saved_high_us")
            saved.append(Bar(who, value, f"{microseconds(value)} us, {said}", low, high, STYLES.get(said, "")))
        if text["memory, MB"] != "-":
            more = (figures["step_memory_gb"] - original.figures["step_memory_gb"]) * 1e3
            memory.append(Bar(who, more, f"{text['memory, MB']} MB", style="red" if more > 0 else ""))
    if saved:
        noise = f"; thin line: where the median lies with {worth.CONFIDENCE:.0%} confidence; shaded: the noise"
        legend = f"right of the line: faster than the original, left of it: slower{noise if found.noise_us else ''}"
        yield BarChart("Saved a step, us", saved, legend, band=found.noise_us or 0.0)
    if any(bar.value for bar in memory):
        yield BarChart("Memory, MB", memory, "left of the line: less than the original's, right of it: more")


def name(row: Result) -> str:
    """The entry's target, as short as a report has it."""
    return short(row.case.removeprefix(CASE))


def _about_original(row: Result, found: Conclusions, enough_s: float) -> list[str]:
    if not row.ms:
        return [f"The original wasn't measured: {row.note}."]
    speed = f", {row.figures['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row.figures else ""
    memory = [f"{megabytes(row.figures[key])} MB {what}" for key, what in MEMORY.items() if key in row.figures]
    held = f" It holds {', '.join(memory)}." if memory else ""
    lines = [f"A step of the original takes {spread(row.ms, ' ms')}{speed}.{held}"]
    if found.noise_us is None:
        lines.append(
            f"{row.samples} rounds are too few to tell anything. It takes {worth.LEAST_ROUNDS}: try "
            f"--budget {enough_s:.0f}."
        )
    else:
        lines.append(
            f"Noise: measured once more in the same {row.samples} rounds, it differs from itself by up to "
            f"{microseconds(found.noise_us)} us ({found.noise_us / row.ms['p50'] / 10:.1f}%). Nothing smaller counts."
        )
        if found.noise_us > RESTLESS * row.ms["p50"] * 1e3:
            lines.append(
                "That is much: something else is at work on this machine. Try again, or with a larger --budget."
            )
    return lines


MEMORY = {"step_memory_gb": "beyond the model's own", "peak_memory_gb": "in all at its peak"}


def megabytes(gigabytes: float) -> str:
    """``0.0354`` -> ``35.4``."""
    return significant(gigabytes * 1e3)


def cells(row: Result, original: Result, found: Conclusions, here: Mapping[str, str] = HERE) -> tuple[str, ...]:
    """A row's text, by column.

    Args:
        here: verdict -> its words; ``{share}`` is by how much of the original's step, ``{memory}`` of its memory.
    """
    figures, verdict = row.figures, found.verdicts[row.case, row.who]
    calls = figures.get("calls", 0.0)
    share = f"{abs(figures['saved_us']) / original.ms['p50'] / 10:.1f}%" if row.ms and original.ms else ""
    memory = "-"
    if "step_memory_gb" in figures and "step_memory_gb" in original.figures:
        memory = _signed((figures["step_memory_gb"] - original.figures["step_memory_gb"]) * 1e3)
    return (
        name(row),
        f"{row.who}{'*' * row.chosen}",
        f"{calls:.0f}" if "calls" in figures else "-",
        _spread(figures, 1),
        _spread(figures, calls) if calls and row.case != TOGETHER else "-",
        memory,
        here[verdict].format(share=share, memory=f"{worth.less_memory(row, original):.0%}"),
    )


def _spread(figures: dict[str, float], share: float) -> str:
    """``120 (98.0 .. 140)``, divided among so many calls."""
    if "saved_us" not in figures:
        return "-"
    median = microseconds(figures["saved_us"] / share)
    if "saved_low_us" not in figures:
        return median
    low, high = (microseconds(figures[f"saved_{end}_us"] / share) for end in ("low", "high"))
    return f"{median} ({low} .. {high})"


def microseconds(value: float) -> str:
    """To three digits, but no finer than 0.1 us: no clock is."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _signed(value: float) -> str:
    """Three digits that count, with a sign; what is next to nothing is 0."""
    return "0" if abs(value) < 5e-3 else ("+" if value > 0 else "-") + significant(abs(value))


def _legend(rows: Sequence[Result]) -> list[str]:
    known = any("saved_low_us" in row.figures for row in rows)
    within = f" and where it lies with {worth.CONFIDENCE:.0%} confidence" if known else ""
    lines = [
        f"saved: the original's time less this one's, the median of the rounds{within}; "
        "*: what the default mapping takes"
    ]
    if any("step_memory_gb" in row.figures for row in rows):
        lines.append("memory: what the tensors of a step hold at most, more (+) or less (-) than the original's")
    return lines


def _outcome(rows: Sequence[Result], original: Result, found: Conclusions) -> list[str]:
    """The total, what isn't worth it, and whether another order is."""
    lines = []
    total = next((row for row in rows if row.case == TOGETHER), None)
    if total and total.ms and original.ms:
        speed = f", {total.figures['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in total.figures else ""
        # By the differences within the rounds, as in the table: the medians may be of other rounds.
        before = original.ms["p50"]
        p50, times = significant(total.ms["p50"]), factor(before / (before - total.figures["saved_us"] / 1e3))
        said = found.verdicts[total.case, total.who]
        doubt = f" ({DOUBT[said]})" if said in DOUBT else ""
        gain = DOUBT[said] if said == worth.TOO_FEW else f"{times} as fast{doubt}"
        lines.append(f"All together: a step takes {p50} ms{speed}: {gain}.")
    usual = {name(row): found.verdicts[row.case, row.who] for row in rows if row.chosen and row.case != TOGETHER}
    useless = [entry for entry, said in usual.items() if said in (worth.NOISE, worth.SLOWER)]
    if useless:
        lines.append(f"Not worth it here, as far as this run can tell: {', '.join(useless)}.")
    others = [row for row in rows if row.ms and not row.chosen]
    if found.chains or found.without:
        lines.append("Faster here than the default mapping, by more than the noise, for batches of this size:")
    elif found.noise_us is None:
        pass
    elif others:
        lines.append("No other backend is faster than what the default mapping takes, by more than the noise.")
    else:
        lines.append("No order of backends was compared: for each entry only one can run here (--also adds others).")
    return lines


def mapping_lines(found: Conclusions, width: int) -> list[str]:
    """The default mapping with what is better here, as Python source; where it is wrapped it stays Python."""
    names = ["DEFAULT_KERNEL_CONFIG", *(["KernelChoice"] if found.chains else [])]
    line = f"from twinkle.kernel import {', '.join(names)}"
    lines = [line] if len(line) <= width else ["from twinkle.kernel import (", *(f"    {n}," for n in names), ")"]
    lines += ["", "mapping = {", "    **DEFAULT_KERNEL_CONFIG,"]
    for target, (op, backends) in found.chains.items():
        chain = ", ".join(f'"{backend}"' for backend in backends) + "," * (len(backends) == 1)
        value = f'KernelChoice("{op}", ({chain})),'
        if len(target) + len(value) + 8 <= width:
            lines.append(f'    "{target}": {value}')
        else:
            lines += [f'    "{target}":', *paragraph(value, width, indent=8)]
    return [*lines, "}", *(f'mapping.pop("{target}")' for target in found.without)]
