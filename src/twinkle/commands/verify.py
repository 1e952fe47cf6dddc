"""``twinkle-kernel verify``: whether a model gives the same numbers with kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from twinkle.commands.comparison import (
    ALL,
    INPUTS,
    MORE_INPUTS,
    NOT_CALLED,
    NOT_INSTALLED,
    OFF,
    OK,
    UNDECIDED,
    Outcome,
    compare,
)
from twinkle.commands.console import answer, progress, quiet_logs, write_page
from twinkle.commands.models import check_memory, find_model
from twinkle.commands.options import check_files, mapping_for, parse_chain, parse_device, parse_dtype
from twinkle.document import GAP, Bar, BarChart, Part, Table, Text
from twinkle.exits import FAILED, FINE, NOTHING_RUN
from twinkle.kernel.judgement import SURE
from twinkle.kernel.report_text import reasons, short, unimplemented_line
from twinkle.naming import dtype_name


def run(
    model: str,
    *,
    device: str | None,
    dtype: str | None,
    backends: Sequence[str] | None,
    layers: int | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Prints the verdicts; the exit code is 1 when something is off, 3 when nothing was verified, else 0.

    Raises:
        CommandError: there is no such model, device, dtype or backend, the model is too large for this machine, or the
            page can't be written.
    """
    chain = parse_chain(backends)
    chosen = parse_dtype(dtype or "float32")
    source = find_model(model)
    where, how = parse_device(device, present=True)
    assert chosen is not None
    check_files({"--html": html})
    with progress(as_json) as bar, quiet_logs():
        task = bar.add_task(f"building {model}", total=None)
        if source.preset is None:
            # Two models with gradients and one more, and one in fp64 with its gradients.
            check_memory(source, chosen, where, layers, 5 * chosen.itemsize + 2 * 8, "comparing needs about")
        original = source.with_random_weights(chosen, where, layers)
        outcomes = compare(original, mapping_for(chain), bar)
        bar.remove_task(task)
    code = exit_code(outcomes)
    name = dtype_name(chosen)
    facts = {"model": model, "device": where, "dtype": name, "ok": code == FINE}
    said = [
        Text(f"{model}: {type(original).__name__} with random weights, {name} on {where} ({how})", "bold"),
        GAP,
        *parts(outcomes),
        GAP,
        Text(conclusion(outcomes, where, model, chain)),
    ]
    answer(facts | {"entries": [asdict(outcome) for outcome in outcomes]}, said, as_json=as_json)
    write_page(html, f"Do the kernels agree with the original in {model}?", said, silent=as_json)
    return code


def exit_code(outcomes: list[Outcome]) -> int:
    """1: something is off; 3: no kernel was verified; 0: all that were installed are fine."""
    verdicts = [outcome.verdict for outcome in outcomes]
    return FAILED if OFF in verdicts else FINE if OK in verdicts else NOTHING_RUN


def conclusion(outcomes: list[Outcome], device: str, model: str, chain: Sequence[str] = ()) -> str:
    """The last line; ``chain`` are the backends that were asked for."""
    if not any("." in outcome.target for outcome in outcomes):  # else only what concerns every model, such as sdpa
        return (
            "Nothing was verified: no entry of the default mapping names a part of this model; "
            f"`twinkle-kernel plan {model}` lists what no entry covers."
        )
    counted = {
        verdict: sum(o.verdict == verdict for o in outcomes if o.target != ALL and not o.unimplemented)
        for verdict in (OK, OFF, UNDECIDED, NOT_CALLED, NOT_INSTALLED)
    }
    if exit_code(outcomes) == NOTHING_RUN:
        asked = "inductor" in chain
        remedy = "" if asked else "; --backend inductor verifies it with kernels for any device that has a compiler"
        return f"Nothing was verified: no kernel of these chains could be installed and called on {device}{remedy}."
    line = ", ".join(f"{count} {verdict}" for verdict, count in counted.items() if count)
    return f"Entries: {line}. All together: {outcomes[-1].verdict}."


STYLES = {OFF: "red", NOT_INSTALLED: "dim", NOT_CALLED: "yellow", UNDECIDED: "yellow"}
COLUMNS = ("entry", "backend", "sites", "calls", "worst tensor", "used", "verdict")


def parts(outcomes: list[Outcome]) -> list[Part]:
    """One line per outcome, and the reasons; entries that nobody has written a backend for yet share a line."""
    shown = [outcome for outcome in outcomes if not outcome.unimplemented]
    styles = [STYLES.get(outcome.verdict, "") for outcome in shown]
    found: list[Part] = [*_chart(shown)]
    found.append(Table(COLUMNS, [_cells(o) for o in shown], ("sites", "calls", "used"), styles, word="verdict"))
    waiting = unimplemented_line([row for outcome in outcomes for row in outcome.rows])
    used = (
        f"used: share of the allowed error that the worst tensor uses, median of {INPUTS} inputs; where that "
        f"is between 100% and {SURE:.0%}, of {MORE_INPUTS} others"
    )
    found += [Text(waiting, "dim"), Text(used, "dim")]
    for outcome in outcomes:
        if outcome.reason:
            found.append(Text(f"{short(outcome.target)}: {outcome.reason}", "red" if outcome.verdict == OFF else ""))
    return found + reasons([row for outcome in shown for row in outcome.rows])


def _chart(outcomes: list[Outcome]) -> Iterator[BarChart]:
    bars = [
        Bar(short(o.target), o.used, f"{percent(o.used)}, {o.verdict}", style=STYLES.get(o.verdict, ""))
        for o in outcomes
        if o.used is not None
    ]
    if bars:
        legend = f"dashed: the limit; no bar is drawn longer than {SURE:.0%}"
        yield BarChart("Share of the allowed error that the worst tensor uses", bars, legend, limit=1.0, ends=SURE)


def percent(used: float) -> str:
    """``0.987`` -> ``99%``; rounded up near 1, so that what is over the limit never reads as 100 %."""
    return f"{math.ceil(used * 1000) / 1000:.1%}" if 1 < used < 1.1 else f"{used:.0%}"


def _cells(outcome: Outcome) -> tuple[str, ...]:
    measured = outcome.used is not None
    return (
        short(outcome.target),
        ", ".join(outcome.backends) or "-",
        str(outcome.sites) if measured else "-",
        str(outcome.calls) if measured else "-",
        (outcome.worst or "-").removeprefix("gradient of ").removeprefix("model.").removesuffix(".weight"),
        percent(outcome.used) if outcome.used is not None else "-",
        outcome.verdict,
    )
