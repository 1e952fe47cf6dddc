"""What a call costs on the host: ``python -m benchmarks.host --json FILE``.

Tensors so small (64x128 for a norm) that the device has nothing to do: the ops of :mod:`twinkle.bench.ops` in bf16, and
two floors, ``x * w`` and an ``autograd.Function`` that launches nothing.
"""

from __future__ import annotations

from benchmarks.ops import report
from benchmarks.program import arguments, device_option, finish, progress, start
from twinkle.bench.cases import host_items
from twinkle.bench.ops import measure_all
from twinkle.bench.results import Run

OPS = ("rms_norm", "swiglu", "rotary")


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("host", "Times what a call costs on the host.")
    device_option(parser)
    parser.add_argument("--budget", type=float, default=40.0, metavar="SECONDS", help="when to stop (default: 40)")
    options = parser.parse_args(argv)
    device = start(options)
    run = Run("host", device, {"quick": options.quick, "budget_s": options.budget})
    items = host_items(OPS)
    measure_all(run, items, budget=options.budget, quick=options.quick, compiled=False, progress=progress)
    return finish(run, options, report(run))


if __name__ == "__main__":
    main()
