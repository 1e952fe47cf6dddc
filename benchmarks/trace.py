"""What the device did in one call, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from twinkle.bench.clocks import synchronize

KERNEL = "kernel"
ON_DEVICE = (KERNEL, "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events. Annotations, which would count twice, have others."""


def profiled(
    call: Callable[[], Any],
    device: torch.device,
    figures: Callable[[Iterable[dict[str, Any]]], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Figures of a call on an accelerator from its trace; empty where that has no kernels.

    Args:
        figures: from a trace's events; ``kernels`` and ``gpu_busy_ms`` when not given.
    """
    synchronize(device)
    # Without the CPU's activities: they would make the trace large and say nothing that is asked here.
    with profile(activities=supported_activities() - {ProfilerActivity.CPU}) as found:
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return (figures or device_figures)(json.loads(path.read_text(errors="replace"))["traceEvents"])


def device_figures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Both figures from a trace's events, whose times are in microseconds."""
    ours = _on_device(events)
    kernels = sum(event["cat"] == KERNEL for event in ours)
    return {"kernels": float(kernels), "gpu_busy_ms": busy_ms(ours)} if kernels else {}


def kinds_of_work(
    events: Iterable[dict[str, Any]], kinds: Mapping[str, Callable[[str], bool]], communication: Collection[str]
) -> dict[str, float]:
    """How long a device works on what: ``<kind>_ms`` for each, ``rest_ms``, ``gpu_busy_ms``, and ``exposed_ms``.

    Kinds on different streams overlap, so they add up to more than the device is busy.

    Args:
        kinds: kind -> whether an event of that name is of it; the first that says so.
        communication: those kinds whose time is ``exposed`` while no other runs.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*kinds, "rest")}
    ours = _on_device(events)
    for event in ours:
        found[next((kind for kind, of_it in kinds.items() if of_it(event["name"])), "rest")].append(event)
    if not ours:
        return {}
    computing = [event for kind, own in found.items() if kind not in communication for event in own]
    busy = busy_ms(ours)
    figures = {f"{kind}_ms": busy_ms(own) for kind, own in found.items()}
    return {**figures, "gpu_busy_ms": busy, "exposed_ms": round(busy - busy_ms(computing), 3)}


def _on_device(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]


def busy_ms(events: Iterable[dict[str, Any]]) -> float:
    """The time that any of the events takes."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        busy += max(0.0, end - max(begin, until))  # streams overlap
        until = max(until, end)
    return round(busy / 1e3, 3)
