"""Timing on a CPU and on accelerators, interleaved rounds, and what the machine can do at best."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from twinkle.naming import dtype_name

Call = Callable[[], Any]


class Clock(Protocol):
    """How a call is timed."""

    def repeats(self, call: Call) -> int:
        """How many calls make up a sample."""

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        """Takes a sample; what comes back gives its milliseconds per call, after :meth:`wait`."""

    def wait(self) -> None:
        """Until all samples can be read."""


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


class EventClock:
    """Time between two events on an accelerator's stream, with the cache flushed before; read after the round's end.

    The flush also gives the host time to get ahead, so it hides a part of what a call costs on the host: the more bytes
    it writes, the larger a part.
    """

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.flush = torch.empty(cache_bytes, dtype=torch.int8, device=device)

    def repeats(self, call: Call) -> int:
        return 1

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end)

    def wait(self) -> None:
        synchronize(self.device)


class SubmitClock(CpuClock):
    """Wall time until the calls are submitted to an accelerator: what they cost on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(shortest_s=1e-3)
        self.device = device

    def start(self, call: Call, repeats: int) -> Callable[[], float]:
        synchronize(self.device)
        return super().start(call, min(repeats, 100))  # the queue must not fill up

    def wait(self) -> None:
        synchronize(self.device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if device.index is None:
        module.synchronize()
    else:
        module.synchronize(device)


def use(device: torch.device) -> None:
    """Makes an accelerator the current one: events are recorded there, and streams belong to it."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device.index)


def clock_for(device: torch.device, host_apart: bool = False) -> Clock:
    """The clock for calls that work on that device.

    Args:
        host_apart: what a call costs on the host has a figure of its own, and shall not be in this one.
    """
    return CpuClock() if device.type == "cpu" else EventClock(device, 2**29 if host_apart else 2**28)


def host_clock_for(device: torch.device) -> Clock | None:
    """The clock for what calls cost on the host; None on a CPU, where that is all the time there is."""
    return None if device.type == "cpu" else SubmitClock(device)


def interleaved(
    calls: dict[str, Call],
    clock: Clock,
    *,
    rounds: int,
    seconds: float,
    warm_up: int = 2,
    within: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, list[float]]:
    """Times every call once per round, so that a drift of the machine hits all alike.

    Args:
        rounds: at most that many, at least three.
        seconds: no further round is started after that.
        warm_up: how often each is called before.
        within: what holds while somebody is called, entered and left for each sample, outside its time. Calls of its
            own come before the sample, a few if they are short: what the first ones in there cost is no part of it.

    Returns:
        who -> milliseconds, one per round.
    """
    around = {who: (within or {}).get(who, contextlib.nullcontext) for who in calls}
    repeats = {}
    for who, call in calls.items():
        with around[who]():
            for _ in range(warm_up):
                call()
            clock.wait()
            repeats[who] = clock.repeats(call)
    samples: dict[str, list[float]] = {who: [] for who in calls}
    order = list(calls)
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - begin > seconds:
            break
        order = order[1:] + order[:1]  # nobody always comes after the same
        pending = []
        for who in order:
            with around[who]():
                if within and who in within:
                    _warm_up(calls[who])
                pending.append((who, clock.start(calls[who], repeats[who])))
        clock.wait()
        for who, read in pending:
            samples[who].append(read())
    return samples


def timed_both(
    calls: dict[str, Call],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    host: bool = True,
    within: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, tuple[list[float], list[float] | None]]:
    """Times every call by the device's clock, then by the host's.

    Args:
        rounds, within: see :func:`interleaved`.
        seconds: for both clocks together.
        host: whether it is timed by the host's clock at all.

    Returns:
        who -> milliseconds until the work is done, and until it is handed to the device: None where there is no such
        clock, see :func:`host_clock_for`.
    """
    host_clock = host_clock_for(device) if host else None
    clock = clock_for(device, host_apart=host_clock is not None)
    share = seconds if host_clock is None else seconds / 2
    done = interleaved(calls, clock, rounds=rounds, seconds=share, within=within)
    if host_clock is None:
        return {who: (ms, None) for who, ms in done.items()}
    handed_over = interleaved(calls, host_clock, rounds=rounds, seconds=share, within=within)
    return {who: (ms, handed_over[who]) for who, ms in done.items()}


def _warm_up(call: Call) -> None:
    """Calls it once or, until the time is over, more often: Python's own shortcuts take some calls."""
    begin = time.perf_counter()
    for _ in range(10):
        call()
        if time.perf_counter() - begin > 5e-4:
            return


def ceilings(device: torch.device, quick: bool = False) -> dict[str, float]:
    """What this machine can do at best, measured now: memory traffic of a copy, and a square matrix product."""
    accelerated = device.type != "cpu"
    size = 2**16 if quick else 2**29 if accelerated else 2**25
    side = 64 if quick else 8192 if accelerated else 1024
    dtype = torch.bfloat16 if accelerated else torch.float32
    for part in (1, 4, 16):  # of what a large accelerator takes
        try:
            return _ceilings(device, size // part, side // part, dtype)
        except torch.OutOfMemoryError:
            continue
    return {}


def _ceilings(device: torch.device, size: int, side: int, dtype: torch.dtype) -> dict[str, float]:
    source = torch.zeros(size, dtype=torch.float32, device=device)
    target, matrix = torch.empty_like(source), torch.randn(side, side, device=device).to(dtype)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "matmul": lambda: matrix @ matrix}
    best = {who: min(ms) for who, ms in interleaved(calls, clock_for(device), rounds=10, seconds=2).items()}
    return {
        "copy_gb_per_s": round(2 * size * 4 / best["copy"] / 1e6, 1),
        f"matmul_{dtype_name(dtype)}_tflop_per_s": round(2 * side**3 / best["matmul"] / 1e9, 3),
    }
