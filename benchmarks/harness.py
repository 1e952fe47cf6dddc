"""What the benchmark programs share: the clock, interleaved rounds, the result file and the table.

A result file is one JSON object: ``schema`` (the version of this layout), ``run`` (what all rows have in common: id,
program, device, threads, versions, ceilings, settings) and ``results``, a list of rows as :class:`Result` describes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
PACKAGES = {"torch": "torch", "triton": "triton", "transformers": "transformers", "liger": "liger-kernel"}


@dataclass(frozen=True)
class Result:
    """One candidate in one case.

    Attributes:
        case: what was measured, parts divided by ``/``; for an op ``op/variant/f`` (forward) or ``op/variant/fb``
            (forward and backward).
        who: the candidate: ``hf`` is what transformers does, other names are backends or libraries.
        shape: for people and for grouping, e.g. ``2048x1024``.
        dtype: e.g. ``bfloat16``; ``-`` where there is none.
        ms: ``{"p20", "p50", "p80"}`` in milliseconds; None when it was not measured.
        samples: how many samples these are of.
        note: why it was not measured, or what else there is to know.
    """

    case: str
    who: str
    shape: str
    dtype: str
    ms: dict[str, float] | None
    samples: int = 0
    note: str = ""


@dataclass
class Run:
    """All results of one call of a program."""

    program: str
    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The result file's content. It names no host, no user and no path."""
        now = datetime.datetime.now(datetime.UTC)
        return {
            "schema": SCHEMA,
            "run": {
                "id": f"{self.program}-{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
                "program": self.program,
                "device": device_name(self.device),
                "device_type": self.device.type,
                "threads": torch.get_num_threads(),
                "versions": {"python": platform.python_version(), **versions()},
                "ceilings": self.ceilings,
                "settings": self.settings,
            },
            "results": [asdict(result) for result in self.results],
        }

    def write(self, path: str | Path) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """Name -> version of the packages whose kernels are measured; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: torch.device) -> str:
    """The device's model, e.g. ``NVIDIA H200`` or ``AMD EPYC, 2 cores``."""
    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    models = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.machine()


# --- clocks -----------------------------------------------------------------------------------------------------------

Call = Callable[[], Any]


class CpuClock:
    """Wall time. A sample of a short call is the mean of several, so that the clock's resolution doesn't matter."""

    def __init__(self, shortest_s: float = 2e-4) -> None:
        self.shortest_s = shortest_s

    def repeats(self, call: Call) -> int:
        start = time.perf_counter()
        call()
        return max(1, round(self.shortest_s / max(time.perf_counter() - start, 1e-7)))

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        ms = (time.perf_counter() - begin) * 1e3 / repeats
        return lambda: ms

    def wait(self) -> None:
        pass


class CudaClock:
    """Time between two events on the stream, with the L2 cache flushed before; read after the round's end.

    The flush also gives the host time to get ahead, so it hides a part of what a call costs on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)

    def repeats(self, call: Call) -> int:
        return 1

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


class SubmitClock(CpuClock):
    """Wall time until the calls are submitted to the accelerator: what they cost on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(shortest_s=1e-3)
        self.device = device

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        torch.cuda.synchronize(self.device)
        return super().start(call, min(repeats, 100))  # the queue must not fill up

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_for(device: torch.device) -> CpuClock | CudaClock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def interleaved(calls: dict[str, Call], clock: Any, *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Times every call once per round, so that a drift of the machine hits all alike.

    Args:
        rounds: at most that many, at least three.
        seconds: no further round is started after that.

    Returns:
        who -> milliseconds, one per round.
    """
    for call in calls.values():
        for _ in range(2):
            call()
    clock.wait()
    repeats = {who: clock.repeats(call) for who, call in calls.items()}
    samples: dict[str, list[float]] = {who: [] for who in calls}
    order = list(calls)
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - begin > seconds:
            break
        order = order[1:] + order[:1]  # nobody always comes after the same
        pending = [(who, clock.start(calls[who], repeats[who])) for who in order]
        clock.wait()
        for who, read in pending:
            samples[who].append(read())
    return samples


def percentiles(samples: list[float]) -> dict[str, float]:
    """20th, 50th and 80th percentile: the sample at or below that rank."""
    ordered = sorted(samples)
    return {f"p{p}": round(ordered[round(p / 100 * (len(ordered) - 1))], 6) for p in (20, 50, 80)}


def ceilings(device: torch.device, quick: bool = False) -> dict[str, float]:
    """What this machine can do at best, measured now: memory traffic of a copy, and a square matrix product."""
    on_gpu = device.type == "cuda"
    size = 2**16 if quick else 2**29 if on_gpu else 2**25
    side = 64 if quick else 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    source = torch.zeros(size, dtype=torch.float32, device=device)
    target, matrix = torch.empty_like(source), torch.randn(side, side, device=device).to(dtype)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "matmul": lambda: matrix @ matrix}
    best = {who: min(ms) for who, ms in interleaved(calls, clock_for(device), rounds=10, seconds=2).items()}
    return {
        "copy_gb_per_s": round(2 * size * 4 / best["copy"] / 1e6, 1),
        f"matmul_{str(dtype).removeprefix('torch.')}_tflop_per_s": round(2 * side**3 / best["matmul"] / 1e9, 3),
    }


# --- programs ---------------------------------------------------------------------------------------------------------


def arguments(program: str, description: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=description)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="toy sizes and few rounds: does it run at all?")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch; its own default when not given")
    return parser


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def significant(value: float) -> str:
    """Three digits that count."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
