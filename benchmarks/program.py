"""What the programs share: the options that all have, and what becomes of the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from twinkle.bench.clocks import Clock, clock_for, host_clock_for, synchronize, use
from twinkle.bench.results import Result, Run, measured, significant, spread
from twinkle.commands.console import CommandError, kept
from twinkle.commands.options import check_writable
from twinkle.platforms import Platform, platform_of
from twinkle.reasons import did_you_mean


def arguments(program: str, description: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=description)
    parser.add_argument("--json", metavar="FILE", type=result_file, help="write the results there")
    parser.add_argument("--quick", action="store_true", help="toy sizes and few rounds: does it run at all?")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch; its own default when not given")
    return parser


def result_file(text: str) -> str:
    """The type of ``--json``: a file that can be written, so that nothing is measured for nothing; makes its folder."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable("the file", path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the folder {path.parent}: {error.strerror}") from None
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def device_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--device``."""
    parser.add_argument("--device", help="cpu, cuda, ...; this machine's accelerator where there is one, else cpu")


def operator_options(parser: argparse.ArgumentParser, names: Collection[str], rounds: int, seconds: float) -> None:
    """Those of a program about ATen operators, with its defaults: which of them, on which device, how long."""
    device_option(parser)
    parser.add_argument("--op", choices=names, action="append", help="only this operator; may be repeated")
    most = f"samples of each candidate at most (default: {rounds})"
    parser.add_argument("--rounds", type=int, default=rounds, help=most)
    for_how_long = f"for the rounds of one call (default: {seconds:g})"
    parser.add_argument("--seconds", type=float, default=seconds, help=for_how_long)


def platform_here(parser: argparse.ArgumentParser, device: torch.device) -> Platform:
    """The device's platform; where it has none here, the program ends as by a wrong option."""
    platform = platform_of(device.type)
    if platform is None:
        parser.error(f"no platform of the device {device} on this machine")
    return platform


def names_option(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option ``NAME,...`` for candidates."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"no candidate {name!r}{did_you_mean(name, known)}; there is: {', '.join(known)}"
                )
        return names

    return parse


def start(options: argparse.Namespace) -> torch.device:
    """Sets what the options say for the whole process; gives the device to measure on."""
    if options.threads:
        torch.set_num_threads(options.threads)
    named = getattr(options, "device", None)
    if named:
        use(torch.device(named))
        return torch.device(named)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def finish(run: Run, options: argparse.Namespace, text: str) -> Run:
    """Writes the result file and prints the report, which also stands when the file can't be written any more."""
    try:
        with kept("--json", Path(options.json) if options.json else None, run.write, silent=True):
            print(text)
    except CommandError as error:
        sys.exit(str(error))
    return run


def progress(done: int, total: int, label: str) -> None:
    """A line on stderr for what comes next."""
    if done < total:
        print(f"[{done + 1}/{total}] {label}", file=sys.stderr, flush=True)


def timed_rounds(step: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """A row's fields: times of so many steps, after some that warm up, and, except on a CPU, the memory one needs.

    The host doesn't wait between them, as it doesn't between the layers of a model: what it is late by beyond the
    flush of the cache is in the time. What a step takes it until everything is submitted stands beside.
    """
    for _ in range(3):
        step()
    figures = {}
    if device.type != "cpu":
        synchronize(device)
        forget_peak(device)
        step()
        synchronize(device)
        figures = peak_memory(device)
    # The clocks after that: one holds memory of its own.
    host_clock = host_clock_for(device)
    ms = _in_a_row(step, clock_for(device), rounds)
    return {**measured(ms, host_clock and _in_a_row(step, host_clock, rounds)), "figures": figures}


def _in_a_row(step: Callable[[], Any], clock: Clock, rounds: int) -> list[float]:
    reads = [clock.start(step, 1) for _ in range(rounds)]
    clock.wait()
    return [read() for read in reads]


def forget_peak(device: torch.device) -> None:
    """From here on counts what :func:`peak_memory` tells."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()


def peak_memory(device: torch.device) -> dict[str, float]:
    """A row's figure: the most memory that PyTorch held at once; none on a CPU."""
    if device.type == "cpu":
        return {}
    return {"peak_memory_gb": round(torch.get_device_module(device).max_memory_allocated() / 1e9, 3)}


def figure_cells(row: Result, names: Iterable[str]) -> list[str]:
    """A row's figures of these names, for a table."""
    return [f"{row.figures[name]:g}" if name in row.figures else "-" for name in names]


TIME_AND_MEMORY = ("ms (p20 .. p80)", "submitted, ms", "peak GB")


def time_and_memory(row: Result) -> tuple[str, ...]:
    """What :func:`timed_rounds` found, for a report: a cell for each of ``TIME_AND_MEMORY``."""
    assert row.ms
    submitted = "-" if row.host_us is None else significant(row.host_us["p50"] / 1e3)
    return spread(row.ms), submitted, *figure_cells(row, ["peak_memory_gb"])


def sized(
    program: str,
    description: str,
    sizes: Mapping[str, Any],
    measure: Callable[[torch.device, torch.dtype, Any, int], Run],
    report: Callable[[Run], str],
    argv: list[str] | None,
) -> Run:
    """A program that times some steps in one size: that of an ``accelerator``, of a ``cpu``, or a ``quick`` one."""
    parser = arguments(program, description)
    device_option(parser)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each candidate (default: 20)")
    options = parser.parse_args(argv)
    device = start(options)
    kind = "quick" if options.quick else "cpu" if device.type == "cpu" else "accelerator"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    run = measure(device, dtype, sizes[kind], 3 if options.quick else options.rounds)
    return finish(run, options, report(run))
