"""From which size on an operator's Triton kernel is faster than PyTorch's own: what ``routes.json`` is made of.

A call takes as long as the device works on it, or as long as the host takes to submit it, whichever is longer: both are
measured, for a kernel that is registered as for PyTorch's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twinkle.aten import catalog
from twinkle.aten.arguments import Arguments
from twinkle.aten.routes import SMALL, Work, every_size
from twinkle.aten.serving import best_level
from twinkle.aten.spec import OperatorSpec
from twinkle.bench.aten import NATIVE
from twinkle.bench.clocks import Call, timed_both
from twinkle.bench.results import Result, measured, slower_us
from twinkle.naming import dtype_name
from twinkle.platforms import Platform

SIZES = tuple(2**power for power in range(20, 31))
"""Bytes of what a call computes; fewer take no longer than it takes to submit them."""

USUAL = (torch.bfloat16, torch.int64)
"""In which a kind of call is measured: the second where its elements are wide."""

INSTALLED = "installed"
"""Who serves where an operator's routes apply: our kernel or PyTorch's own."""


def measurable() -> list[OperatorSpec]:
    """The operators that say how to make calls of every kind and size."""
    return [spec for spec in map(catalog.operator, catalog.names()) if spec.work.samples]


def sweep(
    spec: OperatorSpec,
    platform: Platform,
    sizes: tuple[int, ...],
    *,
    kinds: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    routed: bool = False,
    rounds: int,
    seconds: float,
) -> Iterator[Result]:
    """Native and ours, in turns, for every kind of call, every dtype and every size.

    Args:
        sizes: in bytes; what doesn't fit into the device's memory is left out.
        kinds: of calls; all when None.
        dtypes: of what is computed; when None, for each kind of call the first of :data:`USUAL` that makes one.
        routed: whether ours is the operator as it is installed, its routes included, or its kernel for every call.
        rounds: samples of each candidate, at most.
        seconds: about how long the rounds of one call may take.
    """
    device = torch.device(platform.device_type)
    for kind, sample in spec.work.samples.items():
        if kinds is not None and kind not in kinds:
            continue
        for dtype in (_first_that_makes(kind, spec.work),) if dtypes is None else dtypes:
            for size in sizes:
                try:
                    values = sample(max(1, size // dtype.itemsize), device, dtype)
                    # The smallest of some kinds are of another, or larger than that.
                    if spec.work.kind(*values) == kind and spec.work.size(*values) <= 2 * size:
                        yield from _rows(spec, platform, kind, dtype, size, values, routed, rounds, seconds)
                except torch.OutOfMemoryError:
                    break


def _first_that_makes(kind: str, work: Work) -> torch.dtype:
    def makes(dtype: torch.dtype) -> bool:
        return work.kind(*work.samples[kind](2**10, torch.device("meta"), dtype)) == kind

    return next(filter(makes, USUAL))


@torch.no_grad()
def _rows(
    spec: OperatorSpec,
    platform: Platform,
    kind: str,
    dtype: torch.dtype,
    size: int,
    values: Any,
    routed: bool,
    rounds: int,
    seconds: float,
) -> Iterator[Result]:
    ours = INSTALLED if routed else best_level(spec, platform)
    computed = dtype_name(dtype)
    case = f"{'sweep' if routed else 'routes'}/{spec.name}/{kind}"
    call: Call = Arguments(spec.overload).call(functools.partial(functools.partial, spec.overload), list(values))

    def registered() -> Any:
        with contextlib.nullcontext() if routed else every_size():
            return spec.register_a1(platform=platform.name)

    with registered() as registration:
        call()
    if registration.counts.kernel != 1 and not routed:
        note = f"native serves it: {', '.join(registration.counts.fallbacks)}"
        yield Result(case, ours, str(size), computed, note=note)
        return
    device = torch.device(platform.device_type)
    calls, within = {NATIVE: call, ours: call}, {ours: registered}
    for who, times in timed_both(calls, device, rounds=rounds, seconds=seconds, within=within).items():
        yield Result(case, who, str(size), computed, **measured(*times))


ALLOWED_US, ALLOWED = 8.0, 1.05
"""By how much an installed operator may be slower than PyTorch's own: so many microseconds, after that factor."""


class Point(NamedTuple):
    """One call of the sweep of installed operators; times in microseconds, device or host, whichever takes longer."""

    operator: str
    kind: str
    dtype: str
    size: int
    native_us: float
    installed_us: float

    @property
    def slower(self) -> bool:
        """Whether it is beyond what is allowed."""
        return self.installed_us > ALLOWED * self.native_us + ALLOWED_US


def points(results: Iterable[Result]) -> list[Point]:
    """The calls of a sweep with ``routed``, by medians."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in results:
        if row.ms:
            times.setdefault((row.case, row.dtype, row.shape), {})[row.who] = slower_us(row, "p50")
    found = []
    for (case, dtype, size), both in times.items():
        _, operator, kind = case.split("/")
        found.append(Point(operator, kind, dtype, int(size), both[NATIVE], both[INSTALLED]))
    return found


def too_slow(found: Iterable[Point]) -> list[Point]:
    """Those beyond what is allowed, the worst first."""
    return sorted((point for point in found if point.slower), key=lambda point: point.native_us - point.installed_us)


GAIN = 1.03
"""What is won by less in one dtype may be lost in another."""


def tables(results: list[Result]) -> dict[str, dict[str, int | None]]:
    """Operator -> kind -> the bytes from which on ours was faster by the factor of :data:`GAIN`, beyond the noise, at
    every size that was measured; None for never."""
    times: dict[tuple[str, str], dict[int, dict[bool, Result]]] = {}
    for row in results:
        _, operator, kind = row.case.split("/")
        times.setdefault((operator, kind), {}).setdefault(int(row.shape), {})[row.who == NATIVE] = row
    found: dict[str, dict[str, int | None]] = {}
    for (operator, kind), by_size in times.items():
        least = None
        for size in sorted(by_size, reverse=True):
            pair = by_size[size]
            if len(pair) < 2 or not slower_us(pair[False], "p80") * GAIN < slower_us(pair[True], "p20"):
                break
            least = size
        found.setdefault(operator, {})[kind] = least
    return found


def write(path: Path, platform: str, architecture: str, found: Mapping[str, Mapping[str, int | None]]) -> None:
    """Puts tables into the shipped file; operators that weren't measured stay as they are."""
    shipped = json.loads(path.read_text(encoding="utf-8"))
    shipped.setdefault(platform, {}).setdefault(architecture, {}).update(found)
    path.write_text(text_of(shipped), encoding="utf-8")


def text_of(shipped: Mapping[str, Any]) -> str:
    """The file's text: a line for each operator."""
    platforms = []
    for platform, architectures in shipped.items():
        parts = []
        for architecture, operators in architectures.items():
            lines = ",\n".join(f"      {json.dumps(name)}: {json.dumps(table)}" for name, table in operators.items())
            parts.append(f"    {json.dumps(architecture)}: {{\n{lines}\n    }}")
        platforms.append(f"  {json.dumps(platform)}: {{\n" + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(platforms) + "\n}\n"


def told(found: Mapping[str, Mapping[str, int | None]]) -> Iterator[tuple[str, str, str]]:
    """Operator, kind, and from where on ours serves, for people."""
    for operator, table in found.items():
        for kind, least in table.items():
            yield operator, kind, "never" if least is None else f"from {least} bytes on; {SMALL} below"
