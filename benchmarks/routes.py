"""From which size on ATen operators' kernels are faster than PyTorch's own.

    python -m benchmarks.routes --json FILE [--op clone] [--write]

With ``--write`` what was found becomes this architecture's part of the shipped table, ``src/twinkle/aten/routes.json``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.program import arguments, device_option, finish, progress, start
from twinkle.aten import catalog
from twinkle.aten.availability import triton_missing
from twinkle.aten.routes import architecture
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Run
from twinkle.bench.routes import SIZES, sweep, tables, told, write
from twinkle.layout import plain, table, width_of_terminal
from twinkle.platforms import platform_of

TABLE = Path(__file__).parents[1] / "src/twinkle/aten/routes.json"


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("routes", "Finds the sizes from which on ATen operators' kernels are faster than PyTorch's own.")
    device_option(parser)
    specs = [spec for spec in map(catalog.operator, catalog.names()) if spec.work.samples]
    names = [spec.name for spec in specs]
    parser.add_argument("--op", choices=names, action="append", help="only this operator; may be repeated")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each candidate at most (default: 20)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for the rounds of one call (default: 0.5)")
    parser.add_argument("--write", action="store_true", help="put what was found into the shipped table")
    options = parser.parse_args(argv)
    device = start(options)
    platform = platform_of(device.type)
    if platform is None:
        parser.error(f"no platform of the device {device} on this machine")
    name = None if triton_missing(platform) else architecture(platform)
    if options.write and (name is None or options.quick):
        parser.error(f"--write is for compiled kernels in their real sizes, not for {device}")
    rounds, sizes = (3, SIZES[:2]) if options.quick else (options.rounds, SIZES)
    settings = {"rounds": rounds, "seconds": options.seconds}
    run = Run("routes", device, {**settings, "sizes": list(sizes)}, ceilings(device, options.quick))
    wanted = [spec for spec in specs if not options.op or spec.name in options.op]
    for number, spec in enumerate(wanted):
        progress(number, len(wanted), spec.name)
        run.results += sweep(spec, platform, sizes, **settings)
    found = tables(run.results)
    run.settings["table"] = {platform.name: {name or "-": found}}
    if options.write and name is not None:
        write(TABLE, platform.name, name, found)
    columns = ("operator", "kind of call", "our kernel")
    return finish(run, options, plain(table(columns, list(told(found)), width_of_terminal())))


if __name__ == "__main__":
    main()
