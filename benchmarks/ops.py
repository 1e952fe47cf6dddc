"""The kernels of each op against what they replace: ``python -m benchmarks.ops --json FILE``.

The same as ``twinkle-kernel bench``, without a package for the command line; see :mod:`twinkle.bench.ops`.
"""

from __future__ import annotations

from benchmarks.program import arguments, device_option, finish, progress, start
from twinkle.bench import view
from twinkle.bench.cases import OPS, all_items, quick_items
from twinkle.bench.clocks import ceilings
from twinkle.bench.ops import measure_all
from twinkle.bench.results import Run
from twinkle.layout import laid_out, plain, width_of_terminal


def report(run: Run) -> str:
    """A table per op, a column per candidate; then who was not measured, and how the default mapping did."""
    copy_speed = run.ceilings.get("copy_gb_per_s") if run.device.type != "cpu" else None
    return plain(laid_out(view.parts(run.results, copy_speed, quick=run.settings["quick"]), width_of_terminal()))


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("ops", "Times the kernels of each op against what they replace.")
    device_option(parser)
    parser.add_argument("--op", choices=OPS, action="append", help="only this op; may be repeated")
    parser.add_argument("--budget", type=float, default=240.0, metavar="SECONDS", help="when to stop (default: 240)")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out: it takes most of the time")
    options = parser.parse_args(argv)
    device, ops = start(options), options.op or OPS
    settings = {"quick": options.quick, "budget_s": options.budget}
    run = Run("ops", device, settings, ceilings(device, options.quick))
    items = quick_items(ops) if options.quick else all_items(ops, device)
    compiled = not options.no_inductor
    measure_all(run, items, budget=options.budget, quick=options.quick, compiled=compiled, progress=progress)
    return finish(run, options, report(run))


if __name__ == "__main__":
    main()
