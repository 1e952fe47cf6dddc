"""The demo from beginning to end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle.commands.console import kept, progress, stdout
from twinkle.commands.demo.outcome import Outcome, Run
from twinkle.commands.demo.page import page
from twinkle.commands.demo.processes import Worker, WorkerFailed
from twinkle.commands.demo.terminal import show
from twinkle.commands.demo.text import documents
from twinkle.commands.models import require_transformers
from twinkle.commands.options import check_writable, parse_chain, parse_device
from twinkle.exits import FAILED, FINE

OWN_FOLDER = Path("out")
"""Where the page goes by default: the only folder that is made."""

ORDERS = (1, 2)
"""Summation orders of the original besides the usual one."""


def run(*, steps: int, seconds: float, html: Path, device: str | None, backends: Sequence[str] | None) -> int:
    """Trains, compares, prints and writes the page; the exit code is 1 when a check fails.

    Raises:
        CommandError: transformers is missing, or a device, backend or file name can't be used.
    """
    started = time.perf_counter()
    require_transformers()
    chain = parse_chain(backends)
    where, _ = parse_device(device, present=True)
    check_writable("--html", html, may_make=OWN_FOLDER)
    try:
        outcome = train_both(steps, seconds, where, chain)
    except WorkerFailed as failure:
        print(f"{failure.trace}\ntwinkle-kernel: {failure}", file=sys.stderr)
        return FAILED
    console = stdout()
    with kept("--html", html, lambda file: file.write_text(page(outcome), encoding="utf-8"), silent=True):
        show(console, outcome)
    took = time.perf_counter() - started
    console.print(f"\nReport: {html} ({took:.0f} s in all)", style="bold", soft_wrap=True)
    return FINE if outcome.passed() else FAILED


def train_both(steps: int, seconds: float, device: str, chain: tuple[str, ...]) -> Outcome:
    """Leads the two processes through the trainings.

    Args:
        steps: of each training.
        seconds: no further step is begun when both trainings together have taken that long (two at least).
        device: where both train.
        chain: backends that replace every entry's own; empty for the default mapping.

    Raises:
        WorkerFailed: one of them ended with an error.
    """
    texts = documents()
    text = "\n\n".join(document.text for document in texts)
    with (
        progress() as bar,
        Worker("original", text=text, device=device) as original,
        Worker("kernelized", text=text, device=device) as kernelized,
    ):
        task = bar.add_task("building the original", total=None)
        facts = original.ask("prepare")
        bar.update(task, description="kernelizing (a backend may compile now)")
        chosen = kernelized.ask("prepare", backends=list(chain))
        bar.remove_task(task)

        runs = Run(first_call=facts["first_call"]), Run(first_call=chosen["first_call"])
        task = bar.add_task("training both, step by step", total=steps)
        for step in range(steps):
            # In turn, so that whatever else the machine does disturbs both alike.
            for worker, measured in zip((original, kernelized), runs, strict=True):
                measured.add(worker.ask("step"))
            bar.advance(task)
            if step and sum(sum(measured.seconds) for measured in runs) > seconds:
                break
        for worker, measured in zip((original, kernelized), runs, strict=True):
            measured.memory = worker.ask("peak_memory")
        report = kernelized.ask("report")

        done = len(runs[0].losses)
        task = bar.add_task("the original in two more summation orders", total=done * len(ORDERS))
        orders = [_order(original, number, done, bar, task) for number in ORDERS]
        task = bar.add_task("judging and undoing", total=None)
        first_step = kernelized.ask("judge_first_step")
        undone = kernelized.ask("undo")
    return Outcome(
        documents=[document.name for document in texts],
        text_bytes=len(text.encode()),
        device=device,
        device_name=facts["device_name"],
        torch=facts["torch"],
        parameters=facts["parameters"],
        tokens=facts["tokens"],
        steps_asked=steps,
        original=runs[0],
        kernelized=runs[1],
        orders=orders,
        plan=chosen["plan"],
        backends=tuple(chosen["backends"]),
        asked=bool(chain),
        refused=chosen["refused"],
        report=report,
        first_step=[(name, used) for name, used in first_step],
        undo=undone,
    )


def _order(worker: Worker, number: int, steps: int, bar: Any, task: Any) -> list[float]:
    worker.ask("start_order", number=number)
    losses = []
    for _ in range(steps):
        losses.append(worker.ask("step")["loss"])
        bar.advance(task)
    return losses
