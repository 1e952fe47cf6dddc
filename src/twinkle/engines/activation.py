"""What the environment asks for, carried out in this process, and told.

========================= ==============================================================================================
``TWINKLE_A1_OPS``        operators, with commas or spaces between, or ``all``; without it there are none
``TWINKLE_A1_PLATFORM``   a platform's name or alias, or a device profile's
``TWINKLE_A1_REPORT_DIR`` the folder for records and counts; without it both stay in the process
``TWINKLE_A1_ON_ERROR``   ``report`` (the default): the process goes on without our operators; ``stop``: it ends
========================= ==============================================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import current_process, util
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.engines import records
from twinkle.engines.vllm import PREFIX
from twinkle.reasons import Counts, did_you_mean

if TYPE_CHECKING:
    from twinkle.aten.installation import Installation
    from twinkle.aten.profiles import Profile
    from twinkle.aten.registration import Registration

logger = logging.getLogger("twinkle.engines")

OPERATORS = "TWINKLE_A1_OPS"
PLATFORM = "TWINKLE_A1_PLATFORM"
FOLDER = "TWINKLE_A1_REPORT_DIR"
ON_ERROR = "TWINKLE_A1_ON_ERROR"
CHOICES = ("report", "stop")

WISHES = (OPERATORS, PLATFORM, FOLDER, ON_ERROR)

WARNED_OF_FOLDER = "TWINKLE_A1_REPORT_FAILED"
"""Set by the first process that can't write its record, for those that it starts: one WARNING is enough for a run."""

WARNED_OF_WISHES = "TWINKLE_A1_WISHES_FAILED"
"""Likewise by the first process whose environment has wishes that nobody can carry out."""

GLANCE_SECONDS = 1.0
"""How often a process looks whether something was compiled: no call of ours tells, since compiled code makes none."""

_lock = threading.RLock()
_activation: Activation | None = None


class Activation:
    """What was activated in this process, and stays so until it ends.

    Attributes:
        installation: the registered operators; None after an error.
        error: why there are none.
    """

    def __init__(self) -> None:
        self.installation: Installation | None = None
        self.error: Exception | None = None
        self._platform: str | None = None
        self._files: records.Files | None = None

    def carry_out(self) -> None:
        """Registers the operators; an error is kept, logged, and raised only where the environment says so."""
        try:
            stop = _on_error() == "stop"
        except ValueError as error:
            self.error, stop = error, False
        else:
            try:
                self.installation, self._platform = _install(complete=stop)
            except Exception as error:  # a plug-in's error is not the engine's, unless somebody wants that
                self.error = error
        role = current_process().name
        if self.error is None:
            logger.info("%s: registered on %s: %s", role, self._platform, ", ".join(self._registrations()))
            for name, reason in self._left_out().items():
                logger.error("%s: the operator %s was left out: %s", role, name, reason)
        else:
            remedy = "" if stop else f" ({ON_ERROR}=stop makes this stop the process)"
            logger.error("%s: no operator was activated: %s%s", role, self.error, remedy)
        self.tell()
        if self.error is not None and stop:
            raise self.error

    def tell(self) -> None:
        """Writes this process's record, and counts in its file from now on; a folder that fails is one WARNING."""
        folder = os.environ.get(FOLDER, "").strip()
        if not folder:
            return
        registrations = self._registrations()
        operators = {
            name: records.Activated(level=made.level, keys=made.keys, mode=made.mode)
            for name, made in registrations.items()
        }
        asked = {name: os.environ[name] for name in (OPERATORS, PLATFORM, ON_ERROR) if name in os.environ}
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        record = records.Record.here(
            asked=asked, platform=self._platform, operators=operators, left_out=self._left_out(), error=error
        )
        try:
            self._files = records.Files(Path(folder), record)
        except OSError as problem:
            self._files = None
            _warn_once(WARNED_OF_FOLDER, f"no report of the operators: {folder}, named by {FOLDER}: {problem}")
        for name, made in registrations.items():
            made.count_in(Counts() if self._files is None else self._files.counts[name])
        if self._files is not None and registrations:
            threading.Thread(target=self._keep_looking, name="twinkle-glance", daemon=True).start()

    def tell_name(self) -> None:
        """Corrects the record of a forked child, which has its parent's name at first."""
        with contextlib.suppress(OSError):  # the record that is there stays
            if self._files is not None:
                self._files.rename(current_process().name)

    def _keep_looking(self) -> None:
        registrations = list(self._registrations().values())
        while True:
            for made in registrations:
                made.look_for_compiled()
            time.sleep(GLANCE_SECONDS)

    def _left_out(self) -> dict[str, str]:
        """Of ``all``: those that can't be had, with the reason."""
        return {} if self.installation is None else {k: str(why) for k, why in self.installation.left_out.items()}

    def _registrations(self) -> dict[str, Registration]:
        """By operator, with those that come along for the sake of a gradient."""
        installed = self.installation.registrations.values() if self.installation else ()
        return {each.operator: each for made in installed for each in _with_derivative(made)}


def activate() -> Activation | None:
    """Activates in this process what the environment asks for. Later calls change nothing.

    An engine's plug-in calls it in each of the engine's processes; a program that starts processes of its own calls it
    where their work begins. Forked children have their parent's operators, and write a record of their own.

    Returns:
        what was activated, or why not; None when the environment asks for nothing.

    Raises:
        Exception: whatever went wrong, with ``TWINKLE_A1_ON_ERROR=stop`` only.
    """
    global _activation
    _warn_of_wishes()
    if not os.environ.get(OPERATORS, "").strip():
        return None
    with _lock:
        if _activation is None:
            _activation = Activation()
            util.register_after_fork(_activation, Activation.tell_name)
            _activation.carry_out()
        return _activation


def _warn_of_wishes() -> None:
    """Whoever sets one of the variables expects something: silence would be all that a misspelt one gets.

    ``TWINKLE_A1_OPS=`` with nothing in it says that no operator is wanted.
    """
    given = [name for name in os.environ if name.startswith(PREFIX)]
    said = [
        f"{name} is no variable of ours{did_you_mean(name, WISHES)}"
        for name in given
        if name not in (*WISHES, WARNED_OF_FOLDER, WARNED_OF_WISHES)
    ]
    vain = [name for name in given if name in WISHES]
    if vain and OPERATORS not in os.environ:
        said.append(f"{', '.join(vain)}: set, but {OPERATORS} is not, so that no operator is activated")
    if said:
        _warn_once(WARNED_OF_WISHES, "; ".join(said))


def _warn_once(noted: str, text: str) -> None:
    """One WARNING in a run: the variable tells the processes that this one starts, and itself later on."""
    if noted not in os.environ:
        os.environ[noted] = str(os.getpid())
        logger.warning("%s", text)


def _in_child() -> None:
    """A child of a fork would count in its parent's file, and has none of its threads."""
    _lock.release()
    if _activation is not None:
        _activation.tell()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


def _install(complete: bool) -> tuple[Installation, str]:
    """Registers what is asked for.

    Args:
        complete: of ``all``, one that can't be had is an error too.
    """
    from twinkle.aten import install
    from twinkle.aten.errors import RegistrationError

    names = os.environ[OPERATORS].replace(",", " ").split()
    if not names:
        raise ValueError(f"{OPERATORS}={os.environ[OPERATORS]!r} names no operator")
    if "auto" in names:
        raise ValueError(f"{OPERATORS}=auto would measure in every process, while the others run: name the operators")
    if "all" in names and len(names) > 1:
        raise ValueError(f"{OPERATORS} is all, or names of operators, not both: {', '.join(names)}")
    platform = _platform()
    name = platform if isinstance(platform, str) else platform.platform
    installation = install("all" if names == ["all"] else names, platform=platform)
    if complete and installation.left_out:
        installation.close()
        raise RegistrationError(*next(iter(installation.left_out.items())))
    return installation, name


def _platform() -> str | Profile:
    """The platform that is named: by its own name or alias, or by a chip's profile.

    Raises:
        ValueError: none is named, or one that nobody knows.
    """
    from twinkle.platforms import PLATFORMS, get_platform

    wanted = os.environ.get(PLATFORM, "").strip()
    if not wanted:
        here = ", ".join(platform.name for platform in PLATFORMS.values() if platform.missing() is None)
        raise ValueError(f"{OPERATORS} is set but {PLATFORM} is not; on this machine it can be {here}")
    try:
        return get_platform(wanted).name
    except ValueError as unknown:
        try:
            from twinkle.aten.profiles import profile

            return profile(wanted)
        except (ModuleNotFoundError, ValueError) as error:  # without PyYAML there are no profiles
            if isinstance(error, ValueError) and not str(error).startswith("unknown"):
                raise ValueError(f"{PLATFORM}: {error}") from None  # one is meant, and something is wrong in it
            raise ValueError(f"{PLATFORM}: {unknown}; nor is it a device profile") from None


def _on_error() -> str:
    chosen = os.environ.get(ON_ERROR, "").strip().lower() or CHOICES[0]
    if chosen not in CHOICES:
        raise ValueError(f"{ON_ERROR} is {' or '.join(CHOICES)}, not {chosen!r}{did_you_mean(chosen, CHOICES)}")
    return chosen


def _with_derivative(registration: Registration) -> Iterator[Registration]:
    yield registration
    if registration.derivative is not None:
        yield from _with_derivative(registration.derivative)
