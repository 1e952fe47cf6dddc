"""A training step as it is timed: forward, loss and backward, without an optimizer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from twinkle.bench.clocks import synchronize

Step = Callable[[], torch.Tensor]

FAR = 5e-3
"""The loss may differ by this part of the original's: bf16 keeps eight bits."""


def training_step(model: Any, inputs: Mapping[str, Any], call: Callable[..., Any] | None = None) -> torch.Tensor:
    """One step from cleared gradients; the loss, a scalar without gradient.

    Args:
        model: whose gradients are cleared.
        inputs: keyword arguments of a forward, labels included where the model has a loss of its own.
        call: what is called, where it isn't the model itself, e.g. the compiled model.
    """
    from twinkle import presets

    model.zero_grad(set_to_none=True)
    loss = presets.loss((model if call is None else call)(**inputs))
    loss.backward()
    return loss.detach()


def timed(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds until a step is done, and until it is handed to the device, which had nothing else to do."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    submitted = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3, (submitted - begin) * 1e3


def differs(loss: float, expected: float) -> str | None:
    """Why a loss is another one than the original's, and its step not worth timing."""
    if abs(loss - expected) <= FAR * abs(expected):
        return None
    return f"its loss is {loss:.4f}, the original's {expected:.4f}"


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_of(step: Callable[[], Any], model: Any, device: torch.device) -> dict[str, float]:
    """The figures ``step_memory_gb`` and, on an accelerator, ``peak_memory_gb`` of one step.

    On a CPU they come from PyTorch's profiler, which sees each tensor that is made and let go, so that other memory of
    the process doesn't count; on an accelerator from its allocator. Empty where that counts nothing.
    """
    model.zero_grad(set_to_none=True)
    if device.type == "cpu":
        return {"step_memory_gb": round(_most_held(step) / 1e9, 6)}
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return {}
    synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    peak = module.max_memory_allocated(device)
    return {"step_memory_gb": round((peak - before) / 1e9, 6), "peak_memory_gb": round(peak / 1e9, 6)}


def _most_held(step: Callable[[], Any]) -> int:
    """The most bytes of CPU tensors that the step held at a time, beyond those that were there before it."""
    from torch.profiler import ProfilerActivity, profile

    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    kineto: Any = found.profiler.kineto_results
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """PyTorch writes to the process's stderr about profiles that start and end, and about what was there before one."""
    try:
        saved = os.dup(2)
    except OSError:  # there is none
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
