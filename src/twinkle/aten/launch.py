"""Launches of operators' Triton programs: each made once for calls of one layout, and remembered by who makes it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from twinkle.triton_programs import Launch, Program, interpreted

WARPS = 4

MOST_PROGRAMS = 65535
"""A grid of one dimension that every accelerator accepts; what takes more turns loops."""
MORE_PROGRAMS = {"cuda": 2**31 - 1}
"""By what Triton calls its target: where a larger grid is accepted."""


def most_programs(device: torch.device) -> int:
    """The largest grid of one dimension that the device accepts."""
    return MORE_PROGRAMS.get(_target() or "", MOST_PROGRAMS) if device.type == "cuda" else MOST_PROGRAMS


@functools.cache
def _target() -> str | None:
    """What Triton compiles for. To PyTorch the devices of several makers are ``cuda``; AMD's count threads, up to 2³²,
    and not programs."""
    if interpreted():
        return None
    import triton

    return triton.runtime.driver.active.get_current_target().backend  # type: ignore[no-any-return]


def program(
    kernel: Any,
    programs: int,
    *scalars: Any,
    views: tuple[torch.dtype | None, ...] = (),
    warps: int = WARPS,
    **constants: Any,
) -> Callable[..., None]:
    """A function of the kernel's tensors that runs ``programs`` programs of it on the first one's device.

    Whoever makes one remembers it for tensors of the same shapes, strides, dtypes and device: from the second call on a
    launch is little more than the driver's. What Triton's interpreter calls of PyTorch meanwhile isn't the kernel's.

    Args:
        kernel: a ``@triton.jit`` function: tensors, then ``scalars``, then the ``constants`` in any order.
        views: see :class:`twinkle.triton_programs.Launch`.
    """
    made = Program(kernel, Launch((programs,), scalars, constants, warps, views))
    return _interpreting()(made) if interpreted() else made


_here = threading.local()


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    before, _here.interpreting = is_interpreting(), True
    try:
        yield
    finally:
        _here.interpreting = before


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs a program in this thread: what it calls of PyTorch, to move a kernel's
    arguments, is not the kernel's doing."""
    return getattr(_here, "interpreting", False)
