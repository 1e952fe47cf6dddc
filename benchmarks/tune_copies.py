"""Finds the tiles of transposing copies on this GPU: ``TRANSPOSING`` and ``PACKED`` of ``twinkle.aten.strided``.

    python -m benchmarks.tune_copies --json FILE [--itemsize 1] [--budget SECONDS]

For elements of each size, where rows and columns begin at multiples of 16 bytes and where they don't. Every candidate
is compiled in a pool of processes first, then timed with the L2 cache flushed between runs. What the table should say
is printed; it is copied by hand, since the same tiles serve all sizes of tensors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.program import result_file
from twinkle.aten import strided
from twinkle.bench.clocks import ceilings
from twinkle.bench.results import Result, Run

BYTES = 2**28
"""Of a tensor that is copied: several times the L2 cache."""


DTYPES = {**strided.INTEGERS, 16: torch.complex128}
"""By item size."""


class Case(NamedTuple):
    """Elements of so many bytes, in a square whose side is a multiple of 16 bytes or odd."""

    itemsize: int
    odd: bool

    def __str__(self) -> str:
        return f"{self.itemsize} bytes, {'odd' if self.odd else 'aligned'}"

    def tensors(self, bytes_: int) -> tuple[torch.Tensor, torch.Tensor]:
        side = 2 ** ((bytes_ // self.itemsize).bit_length() // 2)
        side -= 3 * self.odd
        source = torch.zeros(side, side, dtype=DTYPES[self.itemsize], device="cuda")
        return torch.empty_like(source), source.t()


def tiles() -> Iterator[tuple[int, int, int]]:
    """Rows, columns and warps worth trying."""
    for height, width, warps in itertools.product((32, 64, 128, 256), (32, 64, 128, 256), (2, 4, 8, 16)):
        if 1024 <= height * width <= 32768 and 8 <= height * width // (32 * warps) <= 128:
            yield height, width, warps


def copying(case: Case, tile: tuple[int, int, int], bytes_: int) -> Callable[[], torch.Tensor]:
    """A copy of the case by such tiles."""
    strided.TRANSPOSING[case.itemsize] = (tile, tile)
    if case.itemsize in strided.PACKED:
        strided.PACKED[case.itemsize] = tile
    strided._copying.cache_clear()
    to, source = case.tensors(bytes_)
    return functools.partial(strided.triton_copy, to, source)


def _compile(job: tuple[Case, tuple[int, int, int]]) -> None:
    try:
        copying(*job, BYTES)()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{job}: {error!r:.200}", file=sys.stderr)


def timed(case: Case, tile: tuple[int, int, int]) -> Result | None:
    """Its row; None where it doesn't run."""
    import triton

    try:
        p20, p50, p80 = triton.testing.do_bench(copying(case, tile, BYTES), warmup=3, rep=15, quantiles=(0.2, 0.5, 0.8))
    except Exception as error:
        print(f"{case} {tile}: {error!r:.200}", file=sys.stderr)
        return None
    to, _ = case.tensors(BYTES)
    figures = {"traffic_mb": 2 * to.numel() * case.itemsize / 1e6}
    times = {"p20": p20, "p50": p50, "p80": p80}
    shape, samples = "x".join(map(str, to.shape)), max(2, int(15 / p50))
    return Result(
        f"tune_copies/{case}", "-".join(map(str, tile)), shape, "-", ms=times, samples=samples, figures=figures
    )


def best(rows: list[Result]) -> list[str]:
    """A line for each case: its fastest tiles, with the share of a copy's speed."""
    found: dict[str, list[Result]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    lines = []
    for case, of in found.items():
        fastest = sorted(of, key=lambda row: row.ms["p50"])[:4]  # type: ignore[index]
        speeds = (f"{row.who} {row.figures['traffic_mb'] / row.ms['p50'] / 1e3:.2f} TB/s" for row in fastest)  # type: ignore[index]
        lines.append("  ".join((case.partition("/")[2], *speeds)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=result_file, required=True)
    parser.add_argument("--itemsize", action="append", type=int, choices=tuple(DTYPES))
    parser.add_argument("--budget", type=float, default=120.0, metavar="SECONDS", help="when to stop (default: 120)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    cases = [Case(size, odd) for size in options.itemsize or DTYPES for odd in (False, True)]
    jobs: list[Any] = list(itertools.product(cases, tiles()))
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        pool.map(_compile, jobs, chunksize=4)
    device = torch.device("cuda")
    run = Run("tune_copies", device, {"quick": False, "budget_s": options.budget}, ceilings(device))
    for case, tile in jobs:
        if time.monotonic() > deadline:
            print("out of time; a larger --budget gives more", file=sys.stderr)
            break
        row = timed(case, tile)
        if row is not None:
            run.results.append(row)
    run.write(options.json)
    print("\n".join(best(run.results)))


if __name__ == "__main__":
    main()
