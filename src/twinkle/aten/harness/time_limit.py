"""A level that doesn't come to its end is a failed check that says where it was, never silence."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from twinkle.aten.harness import places
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec

SECONDS = 1200.0
"""For one operator at one level. The longest takes some minutes, with Triton interpreted on two cores."""

GRACE_SECONDS = 60.0
"""Code that isn't Python's can't be interrupted: after so much more the process ends, with all threads' tracebacks."""


class OutOfTime(BaseException):
    """No Exception, since what goes wrong in a kernel is caught, and the next case would begin."""


def limited(
    level: str,
    run: Callable[[OperatorSpec, Profile], Outcome],
    spec: OperatorSpec,
    profile: Profile,
    seconds: float = SECONDS,
) -> Outcome:
    """What a level finds; where it isn't done in time, that it isn't, and in which line it was.

    Args:
        level: its name.
        run: the level itself.
        seconds: how long it may take.
    """
    try:
        with alarm(seconds):
            return run(spec, profile)
    except OutOfTime as late:
        outcome = started(spec, level, profile)
        outcome.check(f"it was not done within {seconds:g} s; it was at {places.of_error(spec, late)}", False)
        return outcome


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in what runs within it. Python lets only the main thread be interrupted."""
    can_be_interrupted = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    # A program's standard error may be anything; what has no file gets no traceback.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
    before = signal.signal(signal.SIGALRM, _raise) if can_be_interrupted else None
    try:
        if can_be_interrupted:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        if can_be_interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def _raise(*_: Any) -> None:
    raise OutOfTime
