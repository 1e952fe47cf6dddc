"""An engine in small: a program that starts processes, one of which is killed, and has our plug-in called in each."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, shell: list[str] | None = None, **wishes: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python, or a shell that does, with nothing in the environment but these wishes for operators."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWINKLE_A1_")}
    environment |= {f"TWINKLE_A1_{name}": str(value) for name, value in wishes.items()}
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = shell or [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def call(times: int) -> None:
    """What each process does."""
    import torch

    from twinkle.engines.vllm import register

    register()
    register()
    for _ in range(times):
        torch.ones(3).clone()
    torch.ones(0).clone()


def killed() -> None:
    """Dies as the out-of-memory killer would have it."""
    call(7)
    os.kill(os.getpid(), signal.SIGKILL)


PROCESSES: dict[str, tuple[str, Callable[..., None], tuple[int, ...], int]] = {
    "Forked": ("fork", call, (6,), 0),
    "Spawned": ("spawn", call, (5,), 0),
    "Killed": ("spawn", killed, (), -signal.SIGKILL),
}
"""How each is started, what it does, and its exit code."""


def main(roles: list[str]) -> None:
    """Prints what the main process counted itself."""
    call(3)
    processes = []
    for role in roles:
        method, work, arguments, code = PROCESSES[role]
        made = multiprocessing.get_context(method).Process(target=work, args=arguments, name=role)
        made.start()
        processes.append((made, code))
    for process, code in processes:
        process.join()
        assert process.exitcode == code, process
    from twinkle.aten.registration import active

    (clone,) = (made for made in active() if made.operator == "clone")
    print(json.dumps({"kernel": clone.counts.kernel, "fallbacks": dict(clone.counts.fallbacks)}))


if __name__ == "__main__":
    main(sys.argv[1:])
