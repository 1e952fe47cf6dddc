"""Finds the launch configurations of the Triton kernels on this machine's GPU, for ``triton_tuning.json``.

    python -m benchmarks.tune --json FILE [--op rms_norm] [--budget SECONDS]

Each candidate is compiled in a pool of processes first, then timed in one process with the L2 cache flushed between
runs. The output holds the best configuration of each size class, in the form of the shipped table, and all timings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ELEMENTS = 16384 * 4096
"""The size of the tensors that are timed: 128 MiB in bf16, several times the L2 cache."""

WIDTHS = None
NORM_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def candidates(op: str, direction: str, width: int) -> Iterator[tuple[int, ...]]:
    """Launch configurations worth trying, as :func:`twinkle.kernel.ops.triton_support.tuned` returns them."""
    if op == "rms_norm":
        elements = sorted({e for e in (width, 2 * width, 2048, 4096) if width <= e <= 16384})
        per_processor = (1,) if direction == "forward" else (1, 2, 4, 8)
        stages = (1,) if direction == "forward" else (1, 3, 4)
        for size, warps, programs, depth in itertools.product(elements, (1, 2, 4, 8, 16, 32), per_processor, stages):
            if 512 <= size // warps <= 2048 and programs * warps <= 32:
                yield size, warps, programs, depth
    elif op == "glu":
        yield from itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8, 16))
    else:
        yield from itertools.product((1, 2, 4, 8))


def distinct_programs(op: str, direction: str, width: int) -> Iterator[tuple[int, ...]]:
    """One candidate for each program that has to be compiled: those of a norm may differ in how many run at once."""
    seen = set()
    for candidate in candidates(op, direction, width):
        compiled = (candidate[:2] + candidate[3:]) if op == "rms_norm" else candidate
        if compiled not in seen:
            seen.add(compiled)
            yield candidate


def runner(op: str, direction: str, width: int, elements: int) -> Callable[[], Any]:
    """A call that launches one kernel on bf16 tensors of about ``elements`` elements."""
    rows = max(1, elements // width)
    if op == "rms_norm":
        from twinkle.kernel.ops.rms_norm import triton_launch as norm
        from twinkle.kernel.ops.triton_support import launch, workspace

        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
        kind = (1e-6, 0.0, "before")
        key = norm.layout_of(x, weight, None, kind)

        def forward() -> torch.Tensor:
            return norm.launch_forward(launch, key, x, weight, None, y, kind)

        rstd = forward()

        def backward() -> None:
            norm.launch_backward(launch, key, y, x, weight, None, rstd, (dx, dw, None), 0.0, workspace)

        return forward if direction == "forward" else backward
    if op == "glu":
        from twinkle.kernel.ops.glu import triton as module

        grad, gate, up, dgate, dup = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(5))
        kernels = module.kernels
        if direction == "forward":
            tensors = (gate, up, grad)
            return lambda: module._launch(module.launch, op, kernels.forward_kernel, direction, tensors, "silu")
        tensors = (grad, gate, up, dgate, dup)
        return lambda: module._launch(module.launch, op, kernels.backward_kernel, direction, tensors, "silu")
    from twinkle.kernel.ops.rotary import triton as module

    length = max(1, elements // (4 * 40 * width))
    q = torch.randn(4, length, 32, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn(4, length, 8, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = (torch.randn(1, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outputs = (torch.empty_like(q), torch.empty_like(k))
    turn_back = direction == "backward"
    return lambda: module._launch(module.launch, op, (q, k), outputs, cos, sin, 0, 1, turn_back)


def use(op: str, configuration: tuple[int, ...]) -> None:
    """Makes a kernel's launches use a configuration."""
    from twinkle.kernel.ops import triton_support
    from twinkle.kernel.ops.glu import triton as glu
    from twinkle.kernel.ops.rms_norm import triton_launch as rms_norm
    from twinkle.kernel.ops.rotary import triton as rotary

    module = {"rms_norm": rms_norm, "glu": glu, "rotary": rotary}[op]
    module.tuned = lambda *_: configuration  # type: ignore[attr-defined]
    rms_norm._known_shape.cache_clear()
    triton_support._prepared.clear()


def widths(op: str) -> tuple[int, ...]:
    return {"rms_norm": WIDTHS or NORM_WIDTHS, "glu": (12288,), "rotary": (128,)}[op]


def _compile(job: tuple[str, str, int, list[tuple[int, ...]]]) -> None:
    op, direction, width, configurations = job
    call = None
    for configuration in configurations:
        try:
            use(op, configuration)
            call = call or runner(op, direction, width, 64 * width)
            call()
        except Exception as error:
            print(f"{op} {direction} {width} {configuration}: {error!r:.200}", file=sys.stderr)
    torch.cuda.synchronize()


def measure(op: str, direction: str, width: int, deadline: float) -> list[dict[str, Any]]:
    """Median milliseconds of every candidate, fastest first."""
    import triton

    results = []
    use(op, next(candidates(op, direction, width)))
    call = runner(op, direction, width, ELEMENTS)
    for configuration in candidates(op, direction, width):
        if time.monotonic() > deadline:
            break
        use(op, configuration)
        try:
            ms = triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median")
        except Exception as error:
            print(f"{op} {direction} {width} {configuration}: {error!r:.200}", file=sys.stderr)
            continue
        results.append({"launch": list(configuration), "ms": ms})
    return sorted(results, key=lambda result: result["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--op", action="append", choices=("rms_norm", "glu", "rotary"))
    parser.add_argument("--direction", action="append", choices=("forward", "backward"))
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--budget", type=float, default=240.0)
    arguments = parser.parse_args()
    global WIDTHS
    WIDTHS = arguments.width
    deadline = time.monotonic() + arguments.budget
    cases = [
        (op, direction, width)
        for op in arguments.op or ("glu", "rotary", "rms_norm")
        for direction in arguments.direction or ("forward", "backward")
        for width in widths(op)
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
    table: dict[str, dict[str, list[dict[str, Any]]]] = {}
    timings = []
    for op, direction, width in cases:
        measured = measure(op, direction, width, deadline)
        timings.append({"op": op, "direction": direction, "width": width, "candidates": measured})
        if measured:
            up_to = width if op == "rms_norm" else 1 << 20
            table.setdefault(op, {}).setdefault(direction, []).append({"up_to": up_to, "launch": measured[0]["launch"]})
            print(op, direction, width, *(f"{m['launch']} {m['ms']:.4f}" for m in measured[:4]), sep="  ", flush=True)
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    versions = {"torch": torch.__version__, "triton": __import__("triton").__version__}
    arguments.json.write_text(
        json.dumps(
            {
                "program": "tune",
                "device": torch.cuda.get_device_name(),
                "versions": versions,
                "table": {architecture: table},
                "timings": timings,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
