"""For which calls PyTorch's own kernel is faster than ours: measurements as data, by architecture, in ``routes.json``.

``python -m benchmarks.routes --write`` makes the entries of the architecture that it runs on. They hold for compiled
Triton kernels, in registrations of the mode ``"auto"``. Where Triton interprets them, and on platforms of which no
architecture was ever measured, nothing is known: there a kernel serves whatever it can take. On another architecture of
a platform that was measured, PyTorch's own kernel serves everything, which is never a loss.

Those of ``sm_90`` were measured on an H200, in bfloat16 and, of wide elements, int64, from 1 MB to 1 GB
(``benchmarks/results/cuda/routes.json``). A kind of call that is not among an operator's there was never measured.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from twinkle.aten.arguments import PLAIN
from twinkle.platforms import Platform
from twinkle.triton_programs import interpreted

SMALL = "small"
"""A call's code where its kind is worth a kernel, but not so few bytes."""
UNMEASURED = "unmeasured"
"""Where nobody has measured such calls on this architecture."""
SLOWER = "slower"
"""Begins the code of a kind that is never worth one: ``slower-contiguous``."""

Table = Mapping[str, int | None]
"""Of one operator: kind of call -> the bytes from which on our kernel is faster; None where it never is."""

ANY = "any"


def _size_of_first(first: torch.Tensor, *_: Any) -> int:
    return first.numel() * first.itemsize


@dataclass(frozen=True)
class Work:
    """What the time of an operator's calls goes by.

    Args:
        size: how many bytes a call computes, of its leading tensors; an IndexError where no kernel takes it.
        kind: of all its arguments, in the schema's order, of a call that the kernels take: one of ``samples``.
        samples: kind -> ``sample(elements, device, dtype)``: the arguments of such a call, which computes about so many
            elements of that dtype.
    """

    size: Callable[..., int] = _size_of_first
    kind: Callable[..., str] = lambda *_: ANY
    samples: Mapping[str, Callable[[int, torch.device, torch.dtype], tuple[Any, ...]]] = field(default_factory=dict)


class Routes:
    """Where an operator's calls go on one architecture."""

    def __init__(self, work: Work, table: Table | None) -> None:
        self.work = work
        self._table = {} if table is None else table
        worth = [least for least in self._table.values() if least is not None]
        self._least = min(worth, default=math.inf)
        self.code_at_once = SMALL if worth else UNMEASURED if table is None else SLOWER

    def refusal(self, values: list[Any]) -> str | None:
        """The code of the reason why PyTorch's own kernel should serve a call; None where ours should."""
        kind = self.work.kind(*values)
        if kind not in self._table:
            return UNMEASURED
        least = self._table[kind]
        if least is None:
            return f"{SLOWER}-{kind}"
        return SMALL if self.work.size(*values) < least else None

    def at_once(self, leading: int) -> Callable[[tuple[Any, ...]], bool]:
        """A function of a call's arguments: whether PyTorch's own kernel serves it whatever its kind; at little cost.

        Args:
            leading: how many tensors an operator's arguments begin with.
        """
        least, is_tracing, size = self._least, torch._C._is_tracing, self.work.size

        # Every call passes through: the first two cost a third less than the last, which can any number.
        def one_is_small(args: tuple[Any, ...]) -> bool:
            return type(args[0]) in PLAIN and not is_tracing() and args[0].numel() * args[0].itemsize < least

        def two_are_small(args: tuple[Any, ...]) -> bool:
            first, second = args[0], args[1]
            if type(first) not in PLAIN or type(second) not in PLAIN or is_tracing():
                return False
            try:
                return size(first, second) < least
            except IndexError:  # of a tensor with fewer dimensions than it must have
                return False

        def all_are_small(args: tuple[Any, ...]) -> bool:
            tensors = args[:leading]
            if not PLAIN.issuperset(map(type, tensors)) or is_tracing():
                return False
            try:
                return size(*tensors) < least
            except IndexError:
                return False

        if leading == 1 and size is _size_of_first:
            return one_is_small
        return two_are_small if leading == 2 else all_are_small


def architecture(platform: Platform) -> str | None:
    """What the table calls the current device; None where nothing is compiled for it."""
    if interpreted():
        return None
    if platform.triton_backend == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return platform.name


def routes_of(operator: str, work: Work, platform: Platform, level: str) -> Routes | None:
    """Those of an operator's kernel on the current device; None where it serves whatever it can take.

    Args:
        level: what the kernel is written in.
    """
    found = None if _every_size or level != "triton" else architecture(platform)
    measured = table().get(platform.name, {})
    if found is None or not any(operator in operators for operators in measured.values()):
        return None
    return Routes(work, measured.get(found, {}).get(operator))


@functools.cache
def table() -> dict[str, dict[str, dict[str, Table]]]:
    """Platform -> architecture -> operator -> its table."""
    return json.loads(importlib.resources.files("twinkle.aten").joinpath("routes.json").read_text(encoding="utf-8"))


_every_size = False


@contextlib.contextmanager
def every_size() -> Iterator[None]:
    """What is registered within it has no routes, in the whole process: to find out whether kernels work, how fast."""
    global _every_size
    before, _every_size = _every_size, True
    try:
        yield
    finally:
        _every_size = before
