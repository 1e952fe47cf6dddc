"""What result files of ``benchmarks.ops`` decide: ``python -m benchmarks.verdict FILE``.

Cases so small that only the host's work counts are left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass

from twinkle.bench.results import ORIGINAL, Result, medians, read

JUDGED = "torch"
"""Whose results decide: the backend that is chosen only where it is faster."""

SLOWER = 0.97
"""Ours over the original's time, geometric mean: at most this counts as faster."""


@dataclass(frozen=True)
class Comparison:
    """How many times faster one candidate is than another: the geometric mean, the least and the most."""

    cases: int
    mean: float
    least: float
    most: float


def ratios(results: Iterable[Result], op: str, who: str, other: str) -> dict[tuple[str, str, str], float]:
    """``(case, shape, dtype)`` -> the other's median time over ``who``'s, where both were measured."""
    found = {}
    for (case, shape, dtype), rows in medians(results).items():
        small = any(row.host_us for row in rows.values())
        if case.split("/")[0] == op and not small and who in rows and other in rows:
            ours, theirs = rows[who].ms, rows[other].ms
            assert ours is not None and theirs is not None
            found[case, shape, dtype] = theirs["p50"] / ours["p50"]
    return found


def compare(results: Iterable[Result], op: str, who: str, other: str) -> Comparison | None:
    """How many times faster ``who`` is than ``other``; None where no case has both."""
    found = list(ratios(results, op, who, other).values())
    return Comparison(len(found), mean(found), min(found), max(found)) if found else None


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def wins(results: Iterable[Result]) -> dict[str, dict[str, float]]:
    """op -> ``dtype direction`` -> ours over the original's median time, the geometric mean of the op's cases."""
    results = list(results)
    ops = dict.fromkeys(result.case.split("/")[0] for result in results)
    found: dict[str, dict[str, float]] = {}
    for op in ops:
        kinds: dict[str, list[float]] = {}
        for (case, _, dtype), ratio in ratios(results, op, JUDGED, ORIGINAL).items():
            kinds.setdefault(f"{dtype} {case.split('/')[-1]}", []).append(1 / ratio)
        if kinds:
            found[op] = {kind: mean(values) for kind, values in kinds.items()}
    return found


def faster(results: Iterable[Result]) -> set[str]:
    """The ops that results show to be faster in every dtype and both directions."""
    return {op for op, kinds in wins(results).items() if all(ratio <= SLOWER for ratio in kinds.values())}


def main(argv: list[str] | None = None) -> None:
    """Prints the ratios, and what ``twinkle.kernel.ops.torch_support.FASTER`` should say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("file", help="a result file of benchmarks.ops")
    found = read(parser.parse_args(argv).file)
    for op, kinds in wins(found.results).items():
        shares = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in kinds.items())
        print(f"{op}: {JUDGED} takes {shares} of the original's time")
    print(f"FASTER on {found.run['device_type']}: {', '.join(sorted(faster(found.results))) or 'nothing'}")


if __name__ == "__main__":
    main()
