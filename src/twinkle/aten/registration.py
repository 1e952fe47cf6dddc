"""Registering an operator's kernel in PyTorch's dispatcher, and taking it back."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
import weakref
from collections import deque
from typing import Any

import torch

from twinkle.aten.below import Below
from twinkle.aten.compiled import compiled_graphs, warn_of_earlier
from twinkle.aten.errors import NotRegistrableError, RegistrationError
from twinkle.aten.handle import Handle
from twinkle.aten.keys import effective_keys, platform_here, platforms_meant
from twinkle.aten.modes import serving_in_mode
from twinkle.aten.router import Traffic, make_router
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import Platform
from twinkle.reasons import Counting, Counts, Reason

logger = logging.getLogger("twinkle.aten")

_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child of a fork has only the thread that forked: a lock that another one held would never be released there.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_active: dict[tuple[str, str], Registration] = {}
"""(operator, dispatch key) -> what is installed there: dropping a handle must not undo it."""

_buried: list[Registration] = []
"""Closed while somebody else's kernel stood on top, and not taken out yet, oldest first."""

_GRACE_SECONDS = 2.0
_retired: deque[tuple[float, list[Any]]] = deque()
"""(when, kernels) that were taken out lately. PyTorch frees a kernel at once, also under a thread that has been
dispatched to it and waits for the interpreter lock to enter it; a handle keeps it."""


class Registration(Handle):
    """An operator's kernel, live in this process until :meth:`close`.

    Attributes:
        operator: the operator's name.
        platform: the platform's name.
        keys: the dispatch keys at which it is installed.
        level: what the kernel is written in, ``"triton"`` or ``"torch"``.
        counts: what became of the calls: ``kernel``, ``fallbacks`` by reason, ``errors``; and ``compiled``: whether
            something was compiled meanwhile. Code that inductor makes doesn't call operators, so no call of it is
            counted, nor served by the kernel.
        compiled_before: something that was compiled before may go around the kernel as well; a WARNING said so.
        mode: ``"auto"``, ``"triton"`` or ``"native"``, see :func:`twinkle.aten.install`.
        counter: the dictionary whose ``"n"`` counts the calls that arrived.
        derivative: the registration of the operator that PyTorch's derivative of this one calls, where we have a kernel
            for that; it lives as long as this one.
    """

    derivative: Registration | None = None
    compiled_before = False

    def __init__(self, spec: OperatorSpec, platform: Platform, counter: dict[str, int], mode: str = "auto") -> None:
        self.operator = spec.name
        self.platform = platform.name
        self.keys = effective_keys(spec.overload, platform)
        self.counter = counter
        self._graphs = compiled_graphs()
        self.mode = mode
        serving = serving_in_mode(spec, platform, mode)
        self.level = serving.level
        self._overload = spec.overload
        self._traffic = Traffic(spec.name, serving, Counts(), counter)
        self._library: Any = None
        # All before the first is replaced: a kernel at the backend key changes what the autograd key falls back to.
        find_anew = weakref.WeakMethod(self._find_below_anew)  # kernels are kept for a while, a closed handle isn't
        self._below = {key: Below(self._overload, key, find_anew) for key in self.keys}
        self._autograd_key = platform.autograd_key
        self._ours: dict[str, Any] = {}

    def _install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        try:
            for key in self.keys:
                router = make_router(self._traffic, self._below[key], key == self._autograd_key)
                with warnings.catch_warnings():
                    # Replacing what is there is the purpose, and captured kernels are what the warning asks for.
                    warnings.filterwarnings("ignore", "Warning only once for all operators")
                    self._library.impl(self._overload, router, key, with_keyset=True)
                self._ours[key] = torch.library.get_kernel(self._overload, key)
            self._forget_resolutions()
        except BaseException as error:
            self._library._destroy()
            if isinstance(error, RuntimeError):  # before PyTorch 2.13: where Python code of others stands already
                raise RegistrationError.of(self.operator, "already-registered", str(error)) from error
            raise

    def _take_out(self) -> None:
        _retired.append((time.monotonic(), list(self._ours.values())))
        self._ours.clear()
        self._library._destroy()
        self._forget_resolutions()

    def _find_below_anew(self) -> None:
        """Somebody else's kernel, which stood below ours, was taken out: only without ours is to be seen what is there.

        Raises:
            RuntimeError: something stands on top, which would lose what it calls.
        """
        with _lock:
            covered = self._covered_keys()
            if covered:
                raise RuntimeError(
                    f"{self.operator}: a kernel of somebody else that twinkle's stood on at {', '.join(self.keys)} was"
                    f" taken out, and another one stands on top at {', '.join(covered)}: take that one out first"
                )
            self._take_out()
            for below in self._below.values():
                below.find()
            try:
                self._install()
            except BaseException:
                self._stop()
                raise
            logger.warning("%s: a kernel below twinkle's was taken out; calls go to the one below that", self.operator)

    def _stop(self) -> None:
        self._traffic.open = False
        for key in self.keys:
            _active.pop((self.operator, key), None)

    def _forget_resolutions(self) -> None:
        """While tracing, PyTorch remembers which key serves an operator, and calls its kernel, there or not."""
        self._overload._dispatch_cache.clear()

    def _covered_keys(self) -> list[str]:
        """Where another kernel than ours stands: where it was made is all that tells one from another."""
        at = {key: torch.library.get_kernel(self._overload, key) for key in self.keys}
        return [key for key, kernel in at.items() if repr(kernel) != repr(self._ours[key])]

    @property
    def counts(self) -> Counting:
        """What became of the calls until now."""
        self.look_for_compiled()
        return self._traffic.counts

    def look_for_compiled(self) -> None:
        """Notes among the counts whether something was compiled meanwhile: no call of ours tells."""
        if not self.closed:
            self._traffic.counts.compiled = compiled_graphs() != self._graphs

    def count_in(self, counts: Counting) -> None:
        """From now on calls are counted there, from what it holds already."""
        self._traffic.counts = counts

    @property
    def closed(self) -> bool:
        """Whether it was taken back."""
        return not self._traffic.open

    def close(self) -> None:
        """Takes the kernel out; the operator is exactly as before. A second call does nothing.

        Where somebody else has installed something on top, ours stays below it and passes every call on, since what is
        on top may call it; a WARNING says so. It is taken out at the next registration or ``close()`` of any operator
        that finds it on top, a second one of this handle included.
        """
        with _lock:
            _take_out_buried()
            if self.closed:
                return
            if self.derivative is not None:
                self.derivative.close()
            if self.counts.compiled:
                text = (
                    "%s: something was compiled while its kernel was registered; code made by inductor doesn't call it"
                )
                logger.warning(text, self.operator)
            self._stop()
            covered = self._covered_keys()
            if covered:
                text = "%s: something else was registered on top at %s: not taken out, but passing every call on"
                logger.warning(text, self.operator, ", ".join(covered))
                _buried.append(self)
                return
            self._take_out()
            _take_out_buried()  # what this one stood on
            while _retired and _retired[0][0] < time.monotonic() - _GRACE_SECONDS:
                _retired.popleft()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.level} kernel at {', '.join(self.keys)}"
        return f"<Registration of {self.operator} on {self.platform}: {state}>"


def register(
    spec: OperatorSpec, dispatch_key: str, counter: dict[str, int] | None, platform: str | None, mode: str = "auto"
) -> Registration:
    """See :meth:`twinkle.aten.spec.OperatorSpec.register_a1`; the mode is that of :func:`twinkle.aten.install`."""
    _check_counter(spec.name, counter)
    candidates = platforms_meant(spec.name, dispatch_key, platform)
    if spec.by_design is not None:
        raise NotRegistrableError(spec.name, spec.by_design)
    found = platform_here(spec.name, dispatch_key, candidates)
    with _lock:
        _take_out_buried()
        registration = Registration(spec, found, {} if counter is None else counter, mode)
        for key in registration.keys:
            if (spec.name, key) in _active:
                text = f"is registered already at {key}, by {_active[spec.name, key]!r}"
                raise RegistrationError.of(spec.name, "already-registered", text, "close() that one first")
        registration._install()
        _active.update({(spec.name, key): registration for key in registration.keys})
        try:
            _begin_counting(registration)
            if spec.companion is not None:
                registration.derivative = register(spec.companion, dispatch_key, None, platform, mode)
        except BaseException:
            registration.close()
            raise
    registration.compiled_before = warn_of_earlier(spec.name)
    if spec.caution is not None:
        logger.warning("%s is registered: %s; close() it first", spec.name, spec.caution)
    return registration


def _take_out_buried() -> None:
    """Takes out what was closed below somebody else's kernel, where that is gone by now."""
    covered = set(_active)
    for registration in reversed(_buried):
        # The newest first: whatever stands above one of ours stands above the older ones of that operator, too.
        at = {(registration.operator, key) for key in registration.keys}
        if at & covered or registration._covered_keys():
            covered |= at
        else:
            registration._take_out()
            _buried.remove(registration)


def _check_counter(operator: str, counter: Any) -> None:
    """It is written only once the registration stands."""
    if counter is not None and not (isinstance(counter, dict) and isinstance(counter.get("n", 0), int)):
        text = f"a counter is a dictionary whose 'n' is a whole number, not {counter!r}"
        raise RegistrationError.of(operator, "bad-argument", text)


def _begin_counting(registration: Registration) -> None:
    counter = registration.counter
    try:
        counter.setdefault("n", 0)
        counter["n"] += 0  # a dictionary of somebody's own kind may refuse, and a call mustn't fail of that
    except Exception as error:
        reason = Reason.of_error(error, "bad-argument", "writing the counter's 'n'")
        raise RegistrationError(registration.operator, reason) from error


def active() -> list[Registration]:
    """What is registered in this process now, oldest first."""
    return list(dict.fromkeys(_active.values()))
