"""Finds the launch configurations of the Triton kernels on this machine's GPU, for ``triton_tuning.json``.

    python -m benchmarks.tune --json FILE [--op rms_norm] [--budget SECONDS]

Each candidate is compiled in a pool of processes first, then timed in one process with the L2 cache flushed between
runs. The output holds the best configuration of each size class, in the form of the shipped table, and all timings;
with ``--write`` the best ones also go into the shipped table, for this GPU's architecture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import result_file
from twinkle.bench.results import Result, Run

ELEMENTS = 16384 * 4096
"""The size of the tensors that are timed: 128 MiB in bf16, several times the L2 cache."""

TABLE = Path(__file__).parents[1] / "src/twinkle/kernel/ops/triton_tuning.json"
Table = dict[str, dict[str, list[dict[str, Any]]]]
"""op -> direction -> ``{"up_to": size class, "launch": configuration}`` by size."""

NORM_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def candidates(op: str, direction: str, width: int) -> Iterator[tuple[int, ...]]:
    """Launch configurations worth trying, as :func:`twinkle.kernel.ops.triton_support.tuned` returns them."""
    if op == "rms_norm":
        elements = sorted({e for e in (width, 2 * width, 2048, 4096) if width <= e <= 16384})
        per_processor = (1,) if direction == "forward" else (1, 2, 4, 8)
        stages = (1,) if direction == "forward" else (1, 3, 4)
        for size, warps, programs, depth in itertools.product(elements, (1, 2, 4, 8, 16, 32), per_processor, stages):
            fills = direction == "forward" or 8 <= programs * warps <= 32
            if 512 <= size // warps <= 2048 and fills:
                yield size, warps, programs, depth
    elif op == "glu":
        yield from itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8, 16))
    elif op == "qk_norm_rotary":
        programs = (1,) if direction == "forward" else (2, 3, 4, 6, 8)
        yield from itertools.product((512, 1024, 2048, 4096), (2, 4, 8), programs)
    else:
        yield from itertools.product((1024, 2048, 4096), (1, 2, 4, 8))


def distinct_programs(op: str, direction: str, width: int) -> Iterator[tuple[int, ...]]:
    """One candidate for each program that has to be compiled: those of a norm may differ in how many run at once."""
    seen = set()
    for candidate in candidates(op, direction, width):
        compiled = (candidate[:2] + candidate[3:]) if op in ("rms_norm", "qk_norm_rotary") else candidate
        if compiled not in seen:
            seen.add(compiled)
            yield candidate


def runner(op: str, direction: str, width: int, elements: int) -> Callable[[], Any]:
    """A call that launches one kernel, as configured now, on bf16 tensors of about ``elements`` elements."""
    from twinkle.triton_programs import Program

    rows = max(1, elements // width)
    if op == "rms_norm":
        from twinkle.kernel.ops.rms_norm import triton_launch as norm

        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
        if direction == "forward":
            call = norm.forward(Program, x, weight, None, y, (1e-6, 0.0, "before"))
            return lambda: call(x, weight, None, y)
        call = norm.backward(Program, y, x, weight, None, (dx, dw, None), 1e-6, 0.0)
        return lambda: call(y, x, weight, None, dx, dw, None)
    if op == "glu":
        from twinkle.kernel.ops.glu import triton as glu

        tensors = tuple(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(5))
        tensors = tensors[:3] if direction == "forward" else tensors
        call = glu._launched(Program, direction, tensors, "silu")
        return lambda: call(*tensors)
    from twinkle.kernel.ops.rotary import triton as rotary

    length = max(1, elements // (4 * 40 * width))
    q = torch.randn(4, length, 32, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn(4, length, 8, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = (torch.randn(1, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outputs = (torch.empty_like(q), torch.empty_like(k))
    if op == "qk_norm_rotary":
        from twinkle.kernel.ops.fused_norms import qk_launch

        kind = qk_launch.Kind(1e-6, 1e-6, 0.0, "before", 1)
        weights = tuple(torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if direction == "forward":
            call = qk_launch.forward(Program, q, k, outputs, cos, sin, kind)
            return lambda: call(q, k, *outputs, *weights, cos, sin)
        dq, dk, *dw = (torch.empty_like(t) for t in (q, k, *weights))
        call = qk_launch.backward(Program, outputs, q, k, dq, dk, cos, sin, kind, True)
        return lambda: call(*outputs, q, k, dq, dk, *weights, cos, sin, *dw)
    call = rotary._launched(Program, (q, k), outputs, cos, sin, 0, 1, direction == "backward")
    return lambda: call(q, k, *outputs, cos, sin)


def use(op: str, configuration: tuple[int, ...]) -> None:
    """Makes a kernel's launches use a configuration."""
    from twinkle.kernel.ops.fused_norms import qk_launch
    from twinkle.kernel.ops.glu import triton as glu
    from twinkle.kernel.ops.rms_norm import triton_launch as rms_norm
    from twinkle.kernel.ops.rotary import triton as rotary

    module = {"rms_norm": rms_norm, "glu": glu, "rotary": rotary, "qk_norm_rotary": qk_launch}[op]
    module.tuned = lambda *_: configuration  # type: ignore[attr-defined]


def widths(op: str, of_norms: Sequence[int]) -> Sequence[int]:
    return {"rms_norm": of_norms, "glu": (12288,), "rotary": (128,), "qk_norm_rotary": (128,)}[op]


def _compile(job: tuple[str, str, int, list[tuple[int, ...]]]) -> None:
    op, direction, width, configurations = job
    for configuration in configurations:
        try:
            use(op, configuration)
            runner(op, direction, width, 64 * width)()
        except Exception as error:
            print(f"{op} {direction} {width} {configuration}: {error!r:.200}", file=sys.stderr)
    torch.cuda.synchronize()


def measure(op: str, direction: str, width: int, deadline: float) -> list[dict[str, Any]]:
    """Median milliseconds of every candidate, fastest first."""
    import triton

    results = []
    for configuration in candidates(op, direction, width):
        if time.monotonic() > deadline:
            break
        use(op, configuration)
        try:
            call = runner(op, direction, width, ELEMENTS)
            p20, p50, p80 = triton.testing.do_bench(call, warmup=5, rep=25, quantiles=(0.2, 0.5, 0.8))
        except Exception as error:
            print(f"{op} {direction} {width} {configuration}: {error!r:.200}", file=sys.stderr)
            continue
        results.append({"launch": list(configuration), "ms": {"p20": p20, "p50": p50, "p80": p80}})
    return sorted(results, key=lambda result: result["ms"]["p50"])


def write(path: Path, architecture: str, found: Table) -> None:
    """Puts what was found into the shipped table; size classes that were not measured stay as they are."""
    shipped = json.loads(path.read_text())
    for op, directions in found.items():
        for direction, choices in directions.items():
            rows = shipped.setdefault(architecture, {}).setdefault(op, {}).setdefault(direction, [])
            known = {row["up_to"]: row for row in rows} | {row["up_to"]: row for row in choices}
            rows[:] = [known[up_to] for up_to in sorted(known)]
    text = json.dumps(shipped, indent=2)
    # One line for each size class.
    text = re.sub(r"\{\s+(\"up_to\": \d+),\s+(\"launch\": \[)([^\]]*)\]\s+\}", _one_line, text)
    path.write_text(text + "\n")


def _one_line(match: re.Match[str]) -> str:
    up_to, launch, numbers = match.groups()
    return "{" + f"{up_to}, {launch}{', '.join(numbers.replace(',', ' ').split())}]" + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=result_file, required=True)
    parser.add_argument("--op", action="append", choices=("rms_norm", "glu", "rotary", "qk_norm_rotary"))
    parser.add_argument("--direction", action="append", choices=("forward", "backward"))
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--write", action="store_true", help="put the best into triton_tuning.json")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget
    cases = [
        (op, direction, width)
        for op in arguments.op or ("glu", "rotary", "rms_norm")
        for direction in arguments.direction or ("forward", "backward")
        for width in widths(op, arguments.width or NORM_WIDTHS)
        if not (direction == "backward" and width > 16384)
    ]
    # The number of programs is no part of what is compiled.
    jobs = [
        (op, direction, width, list(distinct_programs(op, direction, width))[part::4])
        for op, direction, width in cases
        for part in range(4)
    ]
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        pool.map(_compile, jobs, chunksize=1)
    print(f"compiled {sum(len(job[3]) for job in jobs)} candidates", flush=True)
    table: Table = {}
    run = Run("tune", torch.device("cuda"), {"quick": False, "budget_s": arguments.budget})
    for op, direction, width in cases:
        measured = measure(op, direction, width, deadline)
        for found in measured:
            who, shape = "-".join(map(str, found["launch"])), f"{ELEMENTS // width}x{width}"
            samples = max(2, int(25 / found["ms"]["p50"]))  # do_bench fills 25 ms
            run.results.append(
                Result(f"tune/{op}/{direction}", who, shape, "bfloat16", ms=found["ms"], samples=samples)
            )
        if measured:
            up_to = width if op == "rms_norm" else 1 << 20
            table.setdefault(op, {}).setdefault(direction, []).append({"up_to": up_to, "launch": measured[0]["launch"]})
            best = (f"{m['launch']} {m['ms']['p50']:.4f}" for m in measured[:4])
            print(op, direction, width, *best, sep="  ", flush=True)
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    run.settings["table"] = {architecture: table}
    run.write(arguments.json)
    if arguments.write:
        write(TABLE, architecture, table)


if __name__ == "__main__":
    main()
