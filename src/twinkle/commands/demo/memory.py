"""The peak memory of a training, as far as the system tells.

On an accelerator it is what PyTorch's allocator held at most. On a CPU there is no such count: there it is the largest
resident set of the whole process, interpreter and libraries included, which is why each training has a process of its
own and the value before the training is shown beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """``reset()`` before the training, ``read()`` after it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.before: int | None = None
        self.kind = "resident memory of the process, with interpreter, libraries and a compiler where one was used"

    def reset(self) -> None:
        """Starts the measurement."""
        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
            self.kind = "memory that PyTorch's allocator held"
            self.before = torch.accelerator.memory_allocated(self.device)
            return
        try:
            CLEAR.write_text("5")  # Linux: the peak starts again at the present value
            self.before = _status("VmRSS")
        except OSError:
            self.kind += ", since its start"

    def read(self) -> dict[str, int | str | None]:
        """``before`` and ``peak`` in bytes, None where the system doesn't tell; ``kind`` says what was measured."""
        if not self.on_cpu:
            peak: int | None = torch.accelerator.max_memory_allocated(self.device)
        elif self.before is not None:
            peak = _status("VmHWM")
        else:
            peak = _largest_ever()
        return {"before": self.before, "peak": peak, "kind": self.kind}


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _largest_ever() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
