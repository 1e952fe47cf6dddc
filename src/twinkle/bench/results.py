"""The one layout of all result files.

A result file is one JSON object: ``schema`` (the version of this layout), ``run`` (what all rows have in common: id,
program, device, threads, versions, ceilings, settings) and ``results``, a list of rows as :class:`Result` describes.
The file of a model also has ``conclusions``, which follow from the rows, see :class:`twinkle.bench.worth.Conclusions`;
that of a training ``curves``, the loss before each step by who was trained.
"""

from __future__ import annotations

import datetime
import json
import platform
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.naming import version_of

if TYPE_CHECKING:
    import torch

SCHEMA = 2
PACKAGES = {"torch": "torch", "triton": "triton", "transformers": "transformers", "liger": "liger-kernel"}

ORIGINAL = "hf"
"""The candidate that all others are compared with: what transformers does."""

EVERYBODY = "all"
"""Stands for all candidates of a case that was not measured."""

FIGURES = {
    "traffic_mb": "memory traffic that can't be avoided, in MB: every input read once, every output written once",
    "floor": "1 where the candidate computes something else and is there to show what the least work costs",
    "tokens_per_s": "tokens trained on, by the median step",
    "tokens_per_s_each": "the same for each of the processes",
    "all_to_all_ms": "of one step, the time in which tokens travel to their experts or back; waiting included",
    "sharding_ms": "of one step, the time in which weights are gathered or gradients reduced; waiting included",
    "experts_ms": "of one step, the time of the experts' matrix products",
    "rest_ms": "of one step, the time of all other work on the device",
    "exposed_ms": "of one step, the time in which the device does nothing but communicate",
    "first_step_s": "the first step in a fresh process whose compiler caches are empty",
    "peak_memory_gb": "the most memory that PyTorch held on the device during a step, in GB",
    "kernels": "programs that one step launches on the device",
    "gpu_busy_ms": "of one step, the time in which the device does anything",
    "graphs": "graphs that `torch.compile` made until the end; with one, nothing was compiled twice",
    "graph_breaks": "places where it had to leave the graph",
    "dw_error": "relative error of a weight's gradient, by its norm, against one that was summed up in fp64",
    "first_loss": "of a training, before its first step",
    "last_loss": "the mean of its last ten",
    "loss": "of the first step: all candidates have the same weights and the same batch",
    "skipped": "the share of an attention mask's blocks in which nothing is kept",
    "step_memory_gb": "the most memory that tensors of one step held at a time, beyond what was there before it, in GB",
    "sites": "places of the model that the kernel serves",
    "calls": "calls of the kernel in one step",
    "calls_left": "calls of one step that the kernel left to the original",
    "saved_us": "of a step, against the original: median of the differences within a round, in microseconds",
    "saved_low_us": "where that median begins, with 99 % confidence; not there where the rounds were too few",
    "saved_high_us": "where it ends",
    "gain_us": "the same against what the default mapping takes",
    "gain_low_us": "where that median begins",
    "gain_high_us": "where it ends",
}
"""What :attr:`Result.figures` may hold."""

Times = dict[str, float]


@dataclass(frozen=True)
class Result:
    """One candidate in one case.

    Attributes:
        case: what was measured, parts divided by ``/``; for an op ``op/variant/f`` (forward, without gradients) or
            ``op/variant/fb`` (forward and backward), for a training step ``step/model``; for a model of which parts
            are switched on ``model/target``, see :mod:`twinkle.bench.model`.
        who: the candidate: ``hf`` is what transformers does, ``native`` what PyTorch does, other names are backends or
            libraries; ``all`` where the whole case was not measured.
        shape: for people and for grouping, e.g. ``2048x1024``.
        dtype: e.g. ``bfloat16``; ``-`` where there is none.
        ms: ``{"p20", "p50", "p80"}`` in milliseconds until the work is done; None when it was not measured.
        host_us: the same in microseconds until the work is handed to the device, where that was measured. On a CPU it
            is the same work.
        samples: how many samples these are of.
        chosen: whether the default mapping takes this candidate here.
        figures: what else was measured, see :data:`FIGURES`.
        note: why it was not measured, or what else there is to know.
    """

    case: str
    who: str
    shape: str
    dtype: str
    ms: Times | None = None
    host_us: Times | None = None
    samples: int = 0
    chosen: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass
class Run:
    """All results of one call of a program."""

    program: str
    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    conclusions: dict[str, Any] | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The result file's content. It names no host, no user and no path."""
        import torch

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
            **({} if self.conclusions is None else {"conclusions": self.conclusions}),
            **({"curves": self.curves} if self.curves else {}),
        }

    def write(self, path: str | Path) -> None:
        """Writes the result file, and the folders on the way to it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ResultFile:
    """A result file that was read: ``run`` and ``curves`` are the objects of those names."""

    run: dict[str, Any]
    results: tuple[Result, ...]
    curves: dict[str, list[float]] = field(default_factory=dict)


def read(path: str | Path) -> ResultFile:
    """A result file's content.

    Raises:
        ValueError: it isn't one, or of another version of the layout.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        found = content.get("schema")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        raise ValueError(f"{path} is not a result file: no JSON object") from None
    if found != SCHEMA:
        raise ValueError(f"{path}: the layout's version is {found}, this program reads {SCHEMA}: measure again")
    rows = tuple(Result(**row) for row in content["results"])
    return ResultFile(content["run"], rows, content.get("curves", {}))


def medians(results: Iterable[Result]) -> dict[tuple[str, str, str], dict[str, Result]]:
    """``(case, shape, dtype)`` -> who -> the row, of those that were measured, in the order of the file."""
    found: dict[tuple[str, str, str], dict[str, Result]] = {}
    for result in results:
        if result.ms:
            found.setdefault((result.case, result.shape, result.dtype), {})[result.who] = result
    return found


def percentiles(samples: list[float]) -> Times:
    """20th, 50th and 80th percentile: the sample at or below that rank."""
    ordered = sorted(samples)
    return {f"p{p}": round(ordered[round(p / 100 * (len(ordered) - 1))], 6) for p in (20, 50, 80)}


def measured(ms: list[float], host_ms: list[float] | None = None) -> dict[str, Any]:
    """The fields ``ms``, ``host_us`` and ``samples`` of a row.

    Args:
        ms: milliseconds until the work was done, one per sample.
        host_ms: until it was handed to the device; None where that was not measured.
    """
    host_us = None if host_ms is None else percentiles([one * 1e3 for one in host_ms])
    return {"ms": percentiles(ms), "host_us": host_us, "samples": len(ms)}


def slower_us(row: Result, percentile: str) -> float:
    """How many microseconds a measured call takes: on the device, or to be handed to it, whichever is longer."""
    assert row.ms is not None
    device = row.ms[percentile] * 1e3
    return device if row.host_us is None else max(device, row.host_us[percentile])


def versions() -> dict[str, str | None]:
    """Name -> version of the packages whose kernels are measured; None for one that is not installed."""
    return {name: version_of(distribution) for name, distribution in PACKAGES.items()}


def packages() -> str:
    """The versions on one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items() if version)


def device_name(device: torch.device) -> str:
    """The device's model, e.g. ``NVIDIA H200`` or ``AMD EPYC, 2 cores``."""
    import torch

    if device.type != "cpu":
        describe = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(describe(device)) if describe else device.type
    models = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.machine()


def significant(value: float) -> str:
    """Three digits that count."""
    return f"{value:#.3g}".rstrip(".") if value < 100 else f"{value:.0f}"


def percentile_texts(times: Times, scale: float = 1.0) -> tuple[str, str, str]:
    """The 20th, the 50th and the 80th percentile, in a unit that is ``scale`` times smaller."""
    p20, p50, p80 = (significant(times[p] * scale) for p in ("p20", "p50", "p80"))
    return p20, p50, p80


def spread(times: Times, unit: str = "", to: str = " .. ") -> str:
    """The median, and in parentheses from where to where most samples are."""
    p20, p50, p80 = percentile_texts(times)
    return f"{p50}{unit} ({p20}{to}{p80})"
