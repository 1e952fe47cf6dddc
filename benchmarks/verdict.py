"""Where a result file shows that an op's torch backend is worth its row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.cases import SMALL, sizes

SLOWER = 0.97
"""Ours over the original's time, geometric mean: at most this counts as faster."""


def wins(content: dict[str, Any], who: str = "torch") -> dict[str, dict[str, float]]:
    """op -> ``dtype direction`` -> ours over the original's median time, the geometric mean of the op's cases.

    Args:
        content: a result file of ``benchmarks.ops``.
        who: the backend to judge.

    Cases so small that only the host's work counts are left out: the shape that ``--quick`` measures.
    """
    medians = {(r["case"], r["shape"], r["dtype"], r["who"]): r["ms"]["p50"] for r in content["results"] if r["ms"]}
    ratios: dict[str, dict[str, list[float]]] = {}
    for (case, shape, dtype, name), ms in medians.items():
        op, _, direction = case.split("/")
        original = medians.get((case, shape, dtype, "hf"))
        small = shape in map(sizes, SMALL[op])
        if name == who and original and not small and direction in ("f", "fb"):
            ratios.setdefault(op, {}).setdefault(f"{dtype} {direction}", []).append(ms / original)
    return {
        op: {kind: math.exp(sum(map(math.log, r)) / len(r)) for kind, r in kinds.items()}
        for op, kinds in ratios.items()
    }


def faster(content: dict[str, Any], who: str = "torch") -> set[str]:
    """The ops that a result file shows to be faster in every dtype and both directions."""
    return {op for op, kinds in wins(content, who).items() if all(ratio <= SLOWER for ratio in kinds.values())}


def verdict_of_file(path: str) -> str:
    """For people: the ratios, and what ``twinkle.kernel.ops.torch_support.FASTER`` should say."""
    content = json.loads(Path(path).read_text())
    device = content["run"]["device_type"]
    lines = []
    for op, kinds in wins(content).items():
        ratios = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in kinds.items())
        lines.append(f"{op}: torch takes {ratios} of the original's time")
    won = faster(content)
    lines.append(f"FASTER on {device}: {', '.join(sorted(won)) or 'nothing'}")
    return "\n".join(lines)
