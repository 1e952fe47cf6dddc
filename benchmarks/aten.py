"""ATen operators by their own kernels, by PyTorch's and by FlagGems: ``python -m benchmarks.aten --json FILE``.

The calls are those of each operator's ``benchmark.yaml``; see :mod:`twinkle.bench.aten`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from benchmarks.program import arguments, finish, operator_options, platform_here, progress, start
from twinkle.aten import RegistrationError, catalog
from twinkle.aten.harness.listed import InputsError
from twinkle.bench.aten import NATIVE, check_cases, measure, size_for, wins
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Result, Run, medians, significant
from twinkle.layout import EMPTY_LINE, Block, paragraph, plain, table, width_of_terminal


def report(run: Run, width: int) -> Iterator[Block]:
    """A line per case, a column per candidate: microseconds of the device, and on an accelerator of the host.

    Then where ours is faster, and who was not timed.
    """
    found = medians(run.results)
    everyone = list(dict.fromkeys(row.who for rows in found.values() for row in rows.values()))
    whose: dict[str, Callable[[Result], float | None]] = {
        "microseconds": lambda row: row.ms and row.ms["p50"] * 1e3,
        "of the host": lambda row: row.host_us and row.host_us["p50"],
    }
    for title, us in whose.items():
        lines = []
        for (case, shape, dtype), rows in found.items():
            times = [us(rows[who]) if who in rows else None for who in everyone]
            shown = ["-" if time is None else significant(time) for time in times]
            if any(time is not None for time in times):
                lines.append((case.removeprefix("aten/"), shape, dtype, *shown))
        if lines:
            yield from table((title, "shape", "dtype", *everyone), lines, width, numbers=everyone)
    faster = wins(run.results)
    yield EMPTY_LINE
    text = f"faster than {NATIVE} by more than the noise: {', '.join(faster) or 'none'}"
    yield Block(paragraph(text, width))
    notes = dict.fromkeys(f"{row.who}: {row.note}" for row in run.results if not row.ms)
    yield from (Block(paragraph(note, width)) for note in notes)


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("aten", "Times ATen operators by their own kernels against PyTorch's.")
    operator_options(parser, catalog.names(), rounds=40, seconds=2.0)
    parser.add_argument("--floor", action="store_true", help="also an override that does nothing but call native")
    options = parser.parse_args(argv)
    device = start(options)
    platform = platform_here(parser, device)
    rounds, size = (3, "quick") if options.quick else (options.rounds, size_for(device))
    settings = {"size": size, "rounds": rounds, "seconds": options.seconds}
    run = Run("aten", device, settings, ceilings(device, options.quick))
    logging.getLogger("twinkle.aten").setLevel(logging.ERROR)  # what a registration warns of ends with the sample
    try:  # all before the first is timed: what was measured until then would be lost
        specs = [catalog.operator(name) for name in catalog.chosen(options.op or ())]
        for spec in specs:
            check_cases(spec)
    except (InputsError, RegistrationError) as error:
        parser.error(str(error))
    for number, spec in enumerate(specs):
        progress(number, len(specs), spec.name)
        run.results += measure(spec, platform, **settings, floor=options.floor)
    return finish(run, options, plain(report(run, width_of_terminal())))


if __name__ == "__main__":
    main()
