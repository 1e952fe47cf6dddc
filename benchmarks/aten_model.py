"""What installed ATen operators do to a whole model: ``python -m benchmarks.aten_model --json FILE``.

A training step and a generation of a model with random weights: by PyTorch alone, with what ``install("auto")`` puts in
on this machine, and with ``install("all")``, whose operators serve calls as their routes say. A row's note tells how
often each operator was called, and how often its kernel served.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.program import arguments, device_option, finish, platform_here, progress, start
from benchmarks.workloads import DTYPE, QWEN3_SMALL, Workload, new_model, toy
from twinkle.aten import install
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Result, Run, measured
from twinkle.bench.step import timed, training_step
from twinkle.layout import plain, table, width_of_terminal
from twinkle.naming import dtype_name

NATIVE = "native"
TOKENS = 128
"""Of the prompt and of a greedy generation each."""
ROUNDS_OF_ALL = 3
"""So often at most is ``install("all")`` timed: what it costs isn't a matter of a percent, and it takes the longest."""


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("aten_model", "Times a whole model with and without installed ATen operators.")
    device_option(parser)
    parser.add_argument("--steps", type=int, default=9, help="training steps, of all operators at most 3 (default: 9)")
    parser.add_argument("--generations", type=int, default=9, help="the same (default: 9)")
    options = parser.parse_args(argv)
    device = start(options)
    platform = platform_here(parser, device)
    workload = toy(QWEN3_SMALL) if options.quick else QWEN3_SMALL
    tokens = 4 if options.quick else TOKENS
    run = Run("aten_model", device, {"tokens": tokens}, ceilings(device, options.quick))
    progress(0, 2, "what is worth it here")
    with install("auto", platform=platform.name) as chosen:
        worth = list(chosen.registrations)
    run.settings["auto"] = worth
    model = new_model(workload, device)
    calls = {
        ("train", workload.shape): (_training(model, workload, device), options.steps),
        ("generate", f"1x{tokens}+{tokens}"): (_generating(model, tokens, device), options.generations),
    }
    for number, ((name, shape), (call, rounds)) in enumerate(calls.items()):
        progress(number, len(calls), name)
        for who, fields in _timed(call, rounds, platform.name, worth, device).items():
            run.results.append(Result(f"aten_model/{name}", who, shape, dtype_name(DTYPE), **fields))
    return finish(run, options, report(run))


def _training(model: Any, workload: Workload, device: torch.device) -> Callable[[], Any]:
    shape = workload.batch, workload.length
    ids = torch.randint(0, workload.config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": workload.mask}
    return functools.partial(training_step, model, inputs)


def _generating(model: Any, tokens: int, device: torch.device) -> Callable[[], Any]:
    ids = torch.arange(tokens, device=device)[None]
    options = {"do_sample": False, "pad_token_id": 0, "use_cache": True, "attention_mask": torch.ones_like(ids)}
    return functools.partial(model.generate, ids, min_new_tokens=tokens, max_new_tokens=tokens, **options)


def _timed(
    call: Callable[[], Any], rounds: int, platform: str, worth: list[str], device: torch.device
) -> dict[str, dict[str, Any]]:
    """What is installed -> a row's fields."""
    within: dict[str, Callable[[], Any]] = {
        NATIVE: contextlib.nullcontext,
        "auto": functools.partial(install, worth, platform=platform) if worth else contextlib.nullcontext,
        "all": functools.partial(install, "all", platform=platform),
    }
    ms: dict[str, list[float]] = {who: [] for who in within}
    host: dict[str, list[float]] = {who: [] for who in within}
    served: dict[str, str] = {}
    for number in range(-1, rounds):
        for who, around in within.items():
            if who == "all" and number >= ROUNDS_OF_ALL:
                continue
            with around() as installed:
                done, submitted = timed(call, device)
            if number < 0:  # what the first one compiles is no part of it
                registrations = {} if installed is None else installed.registrations
                served[who] = ", ".join(_served(*each) for each in registrations.items())
                continue
            ms[who].append(done)
            host[who].append(submitted)
    on_host = {} if device.type == "cpu" else host
    return {who: {**measured(ms[who], on_host.get(who)), "note": served[who]} for who in within}


def _served(name: str, registration: Any) -> str:
    return f"{name} {registration.counter['n']} ({registration.counts.kernel} by its kernel)"


def report(run: Run) -> str:
    """A line each."""
    native = {row.case: row.ms["p50"] for row in run.results if row.who == NATIVE and row.ms}
    columns = ("what", "installed", "ms", "of native", "calls")
    rows = [
        (
            row.case.split("/")[1],
            row.who,
            f"{row.ms['p50']:.4g}",
            f"{row.ms['p50'] / native[row.case]:.3f}",
            row.note or "-",
        )
        for row in run.results
        if row.ms
    ]
    return plain(table(columns, rows, width_of_terminal(), numbers=columns[2:4]))


if __name__ == "__main__":
    main()
