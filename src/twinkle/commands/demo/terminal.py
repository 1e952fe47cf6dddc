"""The demo's outcome on a terminal."""

from __future__ import annotations

from rich.console import Console

from twinkle.commands.console import show as print_blocks
from twinkle.commands.demo.outcome import Outcome, downsampled
from twinkle.kernel.report_text import SERVED_COLUMNS, reasons, report_parts, rows_table, select
from twinkle.layout import laid_out, paragraph, table

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 40


def sparkline(values: list[float], low: float, high: float, bars: str = BARS) -> str:
    """One character a value, from the lowest to the highest bar."""
    top = len(bars) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(bars[max(0, min(top, round((value - low) * scale)))] for value in values)


def show(console: Console, outcome: Outcome) -> None:
    """Plan, curves, figures, checks and what they mean."""
    console.print(outcome.setting())
    console.print("\nWhat the default mapping does on this machine", style="bold")
    print_blocks(console, laid_out(report_parts(outcome.plan, lists_all="twinkle-kernel plan --all"), console.width))
    console.print("\nWhat serves in this run", style="bold")
    for sentence in outcome.how_served():
        console.print(sentence)
    rows = [row for row in select(outcome.report).rows if row["state"] not in ("unused", "missing")]
    if outcome.installed:
        print_blocks(console, laid_out([rows_table(outcome.installed, SERVED_COLUMNS)], console.width))
        if outcome.backends:
            print_blocks(console, laid_out(reasons(rows), console.width))

    console.print("\nLoss", style="bold")
    runs = {"original": outcome.original, "kernelized": outcome.kernelized}
    every = [loss for run in runs.values() for loss in run.losses]
    bars = ASCII_BARS if console.options.ascii_only else BARS
    for name, run in runs.items():
        line = sparkline(downsampled(run.losses, WIDTH), min(every), max(every), bars)
        console.print(f"{name:<12}{run.losses[0]:.4f} {line} {run.losses[-1]:.4f}")

    console.print()
    runs_compared = ("original", "kernelized")
    print_blocks(console, table(("", *runs_compared), outcome.figures(), console.width, numbers=runs_compared))
    console.print(f"Memory is the {outcome.original.memory['kind']}", style="dim")
    for sentence in outcome.speed():
        console.print(sentence)

    console.print("\nChecks", style="bold")
    for check in outcome.checks():
        word, style = ("ok", "green") if check.passed else ("FAILED", "bold red")
        first, *more = paragraph(f"{check.name}: {check.detail}", console.width, indent=7)
        console.print(f"{word:<6}", style=style, end=" ")
        for line in (first.lstrip(), *more):
            console.print(line, soft_wrap=True)
