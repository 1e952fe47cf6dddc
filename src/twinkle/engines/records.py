"""What a process says about itself in the folder of the reports, and how a reader finds all of it.

Each process has two files of one name: ``NAME.json``, its activation record, which appears whole or not at all, and
``NAME.counts``, see :mod:`twinkle.engines.tallies`.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from twinkle.engines.tallies import MappedCounts, create, read

ENGINES = ("vllm",)
"""Engines whose versions are of interest, as modules."""


@dataclass(frozen=True, kw_only=True)
class Activated:
    """One operator of a process.

    Attributes:
        level: what its kernel is written in.
        keys: the dispatch keys at which it is installed.
        mode: who serves its calls, see :func:`twinkle.aten.install`.
    """

    level: str
    keys: tuple[str, ...]
    mode: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process did at its start.

    Attributes:
        role: the process's name in its engine: ``EngineCore``, ``VllmWorker-0``.
        pid, parent: numbers of the process and of the one that started it.
        host: the machine.
        started: when the record was written, in UTC.
        asked: the variables of the environment that asked for it.
        platform: the platform's name; None where nothing could be activated.
        operators: by name.
        left_out: operators that would be there too but for their package, with the reason.
        error: why the operators aren't there; None when they are.
        versions: of Python, PyTorch, this project and the engine.
    """

    role: str
    pid: int
    parent: int
    host: str
    started: str
    asked: Mapping[str, str]
    platform: str | None
    operators: Mapping[str, Activated] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, **found: Any) -> Record:
        """That of this process, with what an activation found."""
        return cls(
            role=current_process().name,
            pid=os.getpid(),
            parent=os.getppid(),
            host=socket.gethostname(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            **found,
        )

    @classmethod
    def of(cls, data: Any) -> Record:
        """A record from its JSON.

        Raises:
            ValueError: it is something else.
        """
        names = {each.name for each in fields(cls)}
        try:
            operators = {name: Activated(**{**of, "keys": tuple(of["keys"])}) for name, of in data["operators"].items()}
            # What has a default may be missing: engine and reader may have versions of this project that differ.
            return cls(**{name: data[name] for name in names - {"operators"} if name in data}, operators=operators)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no activation record: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Process:
    """A process as its files show it."""

    record: Record
    counts: Mapping[str, MappedCounts]


class Files:
    """Both files of this process, made at once.

    Args:
        folder: made where it isn't there.
        record: what is written now.

    Attributes:
        counts: by operator.

    Raises:
        OSError: the folder can't be made or written, or has no room. What was begun is taken away again.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._record = record
        self._file = folder / f"{record.host}-{record.pid}-{time.time_ns()}.json"
        counts = self._file.with_suffix(".counts")
        try:
            self.counts = create(counts, list(record.operators))
            self._write()
        except OSError:
            counts.unlink(missing_ok=True)
            raise

    def rename(self, role: str) -> None:
        """Corrects the record where the process has got another name since: forked ones have their parent's first."""
        if role != self._record.role:
            self._record = replace(self._record, role=role)
            self._write()

    def _write(self) -> None:
        unfinished = self._file.with_suffix(".unfinished")
        try:
            with unfinished.open("w", encoding="utf-8") as stream:
                json.dump(asdict(self._record), stream, indent=2)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, self._file)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def read_all(folder: Path) -> tuple[list[Process], list[str]]:
    """All processes that left something in a folder, in the order of their start.

    Returns:
        the processes; and what can't be read, one line for each file. It doesn't hide the others.
    """
    found: list[Process] = []
    problems = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = Record.of(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            problems.append(f"{file.name}: {error}")
            continue
        try:
            found.append(Process(record, read(file.with_suffix(".counts"))))
        except (OSError, ValueError) as error:
            found.append(Process(record, {}))
            problems.append(f"{file.with_suffix('.counts').name}: {error}")
    for counts in sorted(folder.glob("*.counts")):
        if not counts.with_suffix(".json").exists():
            problems.append(f"{counts.name}: there is no record beside it: its process ended, or is, at its very start")
    found.sort(key=lambda process: process.record.started)
    return found, problems


def _versions() -> dict[str, str]:
    """Nothing is imported for that: an engine that isn't there yet has no part in this process."""
    import torch

    import twinkle

    own = {"python": platform.python_version(), "torch": torch.__version__, "twinkle-kernel": twinkle.__version__}
    engines = {name: str(getattr(sys.modules[name], "__version__", "?")) for name in ENGINES if name in sys.modules}
    return {**own, **engines}
