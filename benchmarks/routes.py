"""From which size on ATen operators' kernels are faster than PyTorch's own.

    python -m benchmarks.routes --json FILE [--op clone] [--write]

With ``--write`` what was found becomes this architecture's part of the shipped table, ``src/twinkle/aten/routes.json``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.program import arguments, finish, operator_options, platform_here, progress, start
from twinkle.aten.availability import triton_missing
from twinkle.aten.routes import architecture
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Run
from twinkle.bench.routes import SIZES, measurable, sweep, tables, told, write
from twinkle.layout import plain, table, width_of_terminal

TABLE = Path(__file__).parents[1] / "src/twinkle/aten/routes.json"


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("routes", "Finds the sizes from which on ATen operators' kernels are faster than PyTorch's own.")
    specs = measurable()
    operator_options(parser, [spec.name for spec in specs], rounds=20, seconds=0.5)
    parser.add_argument("--write", action="store_true", help="put what was found into the shipped table")
    options = parser.parse_args(argv)
    device = start(options)
    platform = platform_here(parser, device)
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
