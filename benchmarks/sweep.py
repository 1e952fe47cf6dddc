"""Installed ATen operators, their routes included, against PyTorch's own, over dtypes, sizes and layouts.

    python -m benchmarks.sweep --json FILE [--op clone]

Whoever installs an operator gets PyTorch's own kernel wherever ours isn't faster. What that costs is measured here: no
call should take more than 5 % and 8 us longer than without us.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.program import arguments, finish, operator_options, platform_here, progress, start
from twinkle.aten import catalog
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Result, Run
from twinkle.bench.routes import ALLOWED, ALLOWED_US, measurable, points, sweep, too_slow
from twinkle.layout import plain, table, width_of_terminal
from twinkle.platforms import Platform

SIZES = tuple(2**power for power in range(6, 31, 4))
"""Bytes of what a call computes."""
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.complex128)
FLOATING = ("dropout", "embedding")
"""Which operators compute numbers of the first two."""


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("sweep", "Times installed ATen operators against PyTorch's own over dtypes, sizes and layouts.")
    specs = measurable()
    operator_options(parser, [spec.name for spec in specs], rounds=7, seconds=0.2)
    options = parser.parse_args(argv)
    device = start(options)
    platform = platform_here(parser, device)
    rounds, sizes = (3, SIZES[1:3]) if options.quick else (options.rounds, SIZES)
    settings = {"rounds": rounds, "seconds": options.seconds}
    run = Run("sweep", device, {**settings, "sizes": list(sizes)}, ceilings(device, options.quick))
    wanted = [spec for spec in specs if not options.op or spec.name in options.op]
    for number, spec in enumerate(wanted):
        progress(number, len(wanted), spec.name)
        dtypes = DTYPES[:2] if spec.name in FLOATING else DTYPES
        run.results += sweep(spec, platform, sizes, dtypes=dtypes, routed=True, **settings)
    look_again(run, platform, **settings)
    return finish(run, options, report(run))


LONGER = 5
"""As many times the rounds and the seconds of the first look."""


def look_again(run: Run, platform: Platform, *, rounds: int, seconds: float) -> None:
    """Measures anew, for longer, what seems to be too slow: of hundreds of short looks, one errs by chance."""
    longer = {"rounds": LONGER * rounds, "seconds": LONGER * seconds}
    places = {_identity(row): place for place, row in enumerate(run.results)}
    for point in too_slow(points(run.results)):
        spec, dtypes = catalog.operator(point.operator), (getattr(torch, point.dtype),)
        found = sweep(spec, platform, (point.size,), kinds=(point.kind,), dtypes=dtypes, routed=True, **longer)
        for row in found:
            run.results[places[_identity(row)]] = dataclasses.replace(row, note="measured again, for longer")


def _identity(row: Result) -> tuple[str, ...]:
    return row.case, row.shape, row.dtype, row.who


def report(run: Run) -> str:
    """The calls that take longer than they may, the worst first."""
    found = points(run.results)
    slower = too_slow(found)
    allowed = f"{ALLOWED - 1:.0%} and {ALLOWED_US:g} us"
    said = f"Of {len(found)} calls {len(slower)} take more than {allowed} longer where the operators are installed."
    columns = ("operator", "kind of call", "dtype", "bytes", "native, us", "installed, us")
    rows = [(*point[:3], str(point.size), f"{point.native_us:.1f}", f"{point.installed_us:.1f}") for point in slower]
    return "\n\n".join(
        [said, *([plain(table(columns, rows, width_of_terminal(), numbers=columns[3:]))] if rows else [])]
    )


if __name__ == "__main__":
    main()
