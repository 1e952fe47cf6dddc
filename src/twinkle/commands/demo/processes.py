"""The demo's side of a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any


class WorkerFailed(Exception):
    """A training ended with an error.

    Attributes:
        trace: the traceback in the worker, or the end of what it wrote to stderr.
    """

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class Worker:
    """A process that runs :mod:`twinkle.commands.demo.worker`.

    Args:
        role: ``original`` or ``kernelized``.
        arguments: of the role's class.
    """

    def __init__(self, role: str, **arguments: Any) -> None:
        self.role = role
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # Two trainings take turns, and other programs want the cores too: threads that spin while they wait would cost
        # several times the work itself.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "twinkle.commands.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        self.send(role, **arguments)
        self._pending_start = True

    def send(self, call: str, **arguments: Any) -> None:
        """Sends a request without waiting."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"call": call, "arguments": arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> Any:
        """The result of the oldest request that has none yet.

        Raises:
            WorkerFailed: the worker raised, or is gone.
        """
        if self._pending_start:
            self._pending_start = False
            self._answer()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"the {self.role} training failed: {answer['error']}", answer["trace"])
        return answer["result"]

    def ask(self, call: str, **arguments: Any) -> Any:
        """A request and its result."""
        self.send(call, **arguments)
        return self.receive()

    def _died(self) -> WorkerFailed:
        code = self._process.wait()
        self._stderr.seek(0)
        trace = self._stderr.read().decode(errors="replace")[-4000:]
        return WorkerFailed(f"the process of the {self.role} training ended with exit code {code}", trace)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed with a request unread
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._stderr.close()
