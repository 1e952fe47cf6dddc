"""What the device did in one call, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from twinkle.bench.clocks import synchronize

KERNEL = "kernel"
ON_DEVICE = (KERNEL, "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events. Annotations, which would count twice, have others."""


def profiled(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """The figures ``kernels`` and ``gpu_busy_ms`` of a call on an accelerator; empty where its trace has no kernels."""
    synchronize(device)
    # Without the CPU's activities: they would make the trace large and say nothing that is asked here.
    with profile(activities=supported_activities() - {ProfilerActivity.CPU}) as found:
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return device_figures(json.loads(path.read_text(errors="replace"))["traceEvents"])


def device_figures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Both figures from a trace's events, whose times are in microseconds."""
    ours = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    kernels = sum(event["cat"] == KERNEL for event in ours)
    if not kernels:
        return {}
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in ours):
        busy += max(0.0, end - max(begin, until))  # streams overlap
        until = max(until, end)
    return {"kernels": float(kernels), "gpu_busy_ms": round(busy / 1e3, 3)}
