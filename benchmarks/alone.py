"""A program in processes of its own, so that what one candidate patches, compiles or breaks is nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import twinkle

ROOT = Path(__file__).parents[1]


def alone(
    arguments: Sequence[str], environment: Mapping[str, str], timeout: float, why: Callable[[int, str], str]
) -> str | None:
    """Runs Python to its end, with this source tree's packages; a row's note when that fails, else None.

    Args:
        arguments: of the interpreter.
        environment: variables beside those of this process.
        timeout: seconds after which it is ended, and with it whatever it started.
        why: called with the exit code and everything it wrote, for the note; that is also written to stderr.
    """
    here = [str(ROOT), str(Path(twinkle.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, here))},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=max(timeout, 0.001))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a compiler's workers too
            process.wait()
            return f"out of time: not done after {timeout:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if not code:
            return None
        said.seek(0)
        print(text := said.read(), file=sys.stderr)
        return why(code, text)
