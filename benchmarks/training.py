"""Whether a kernelized model trains as the original does: ``python -m benchmarks.training --json FILE``.

A small Qwen3 is trained on text for some hundred steps: the original in several orders of summation, which shows what
rounding alone does to its loss, and the kernelized model with the fused loss. The curves are in the result file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.program import arguments, device_option, finish, progress, start
from twinkle.bench.clocks import synchronize
from twinkle.bench.results import ORIGINAL, Result, Run, measured, significant
from twinkle.commands.demo.outcome import StepJudgement, judge_losses
from twinkle.commands.demo.text import documents
from twinkle.commands.demo.training import CLIP, LEARNING_RATE, WARM_UP, Order, batches, new_model
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG, OPT_IN_KERNEL_CONFIG
from twinkle.kernel.report import report as report_on
from twinkle.kernel.undo import kernelized
from twinkle.layout import plain, table, width_of_terminal
from twinkle.naming import dtype_name

OURS = "twinkle+fused_ce"
MAPPING = {**DEFAULT_KERNEL_CONFIG, "fused_ce": OPT_IN_KERNEL_CONFIG["fused_ce"]}
"""What is put into the model: the default mapping and the fused loss."""

ORDERS = 3
"""Of the original; the first is the usual one."""

CASE = "training/qwen3-3m"


def train(
    model: Any,
    text: bytes,
    device: torch.device,
    dtype: torch.dtype,
    steps: int,
    order: Order,
    moved: Callable[[], None],
) -> tuple[list[float], list[float]]:
    """Trains with AdamW; the loss before each step, and each step's milliseconds.

    Args:
        dtype: of matrix products; autocast where it isn't fp32, as people train.
        order: of the batches' rows; the model's weights are in it already.
        moved: called after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    data = batches(text, str(device))
    losses, ms = [], []
    for _ in range(steps):
        ids = order.of_batch(next(data))
        synchronize(device)
        begin = time.perf_counter()
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())  # waits for the device
        ms.append((time.perf_counter() - begin) * 1e3)
        moved()
    return losses, ms


def served(model: Any) -> str:
    """What served, and how often."""
    rows = [row for row in report_on(model).rows if row.state == "installed"]
    return ", ".join(f"{row.op} by {row.backend}: {row.calls} calls" for row in rows)


def measure(device: torch.device, dtype: torch.dtype, steps: int, orders: int = ORDERS) -> Run:
    """Trains every candidate; the run has their rows and curves."""
    text = "\n\n".join(document.text for document in documents()).encode()
    run = Run(
        "training", device, {"steps": steps, "orders": orders, "text_bytes": len(text), "learning_rate": LEARNING_RATE}
    )
    total, done = (orders + 1) * steps, 0
    shape, name = "8x64", dtype_name(dtype)

    def moved(who: str) -> None:
        nonlocal done
        done += 1
        if done % 50 == 0:
            progress(done - 1, total, who)

    def add(who: str, losses: list[float], ms: list[float], note: str = "") -> None:
        run.curves[who] = [round(loss, 7) for loss in losses]
        figures = {"first_loss": losses[0], "last_loss": sum(losses[-10:]) / len(losses[-10:])}
        run.results.append(Result(CASE, who, shape, name, **measured(ms), figures=figures, note=note))

    for number in range(orders):
        order = Order(number)
        who = ORIGINAL if number == 0 else f"{ORIGINAL} order {number}"
        model = order.of_model(new_model(str(device)))
        add(who, *train(model, text, device, dtype, steps, order, functools.partial(moved, who)))
    with kernelized(new_model(str(device)), MAPPING) as model:
        losses, ms = train(model, text, device, dtype, steps, Order(0), functools.partial(moved, OURS))
        add(OURS, losses, ms, served(model))
    return run


def judged(curves: dict[str, list[float]]) -> list[StepJudgement]:
    """For each step how far the kernelized loss is from the originals' mean, and how far it may be."""
    return judge_losses(curves[OURS], [losses for who, losses in curves.items() if who != OURS])


def report(run: Run) -> str:
    """A line per candidate, and the judgement."""
    lines = []
    for row in run.results:
        assert row.ms
        first, last = (f"{row.figures[name]:.4f}" for name in ("first_loss", "last_loss"))
        lines.append((row.who, first, last, significant(row.ms["p50"])))
    shown = plain(table(("who", "first loss", "last loss (10 steps)", "ms a step"), lines, width_of_terminal()))
    worst = max(judged(run.curves), key=lambda step: step.used)
    verdict = "within" if worst.used <= 1 else "NOT within"
    return (
        f"{shown}\nThe kernelized curve is {verdict} the original's own spread: it uses at most {worst.used:.2f} of "
        f"what is allowed ({worst.distance:.2g} of {worst.allowed:.2g}).\n{run.results[-1].note}"
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("training", "Trains a small model on text, the original and kernelized.")
    device_option(parser)
    parser.add_argument("--steps", type=int, default=300, help="of each training (default: 300)")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 by autocast; default: that on a GPU, else float32")
    options: argparse.Namespace = parser.parse_args(argv)
    device = start(options)
    dtype = DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    return finish(run := measure(device, dtype, 12 if options.quick else options.steps), options, report(run))


if __name__ == "__main__":
    main()
