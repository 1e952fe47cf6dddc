"""Tests that run Triton kernels on the CPU, in Triton's interpreter.

The interpreter is chosen for a whole process when triton is imported, so these tests need one of their own:

    TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python -m pytest tests/interpreter

Without the variable they are skipped, but for those of our own kernels where there is a GPU to run on. With it,
anything that they need and isn't there is an error, not a skip.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = f"TRITON_INTERPRET=1 python -m pytest {HERE.parent.name}/{HERE.name}"
CHOSEN = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")

if CHOSEN:
    if "triton" in sys.modules:
        raise pytest.UsageError(f"triton was imported before TRITON_INTERPRET could count; run {COMMAND} alone")
    # Liger times dozens of configurations of its MoE kernels, for which the interpreter has no clock.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    try:
        from tests.support.triton_interpreter import install
    except ImportError as error:
        raise pytest.UsageError(f"the interpreter's tests need triton and numpy: {error}") from error
    install()


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.6 converts arrays of one element to numbers, which numpy is about to forbid.
    ignored = "ignore:Conversion of an array:DeprecationWarning:triton.runtime.interpreter"
    config.addinivalue_line("filterwarnings", ignored)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHOSEN:
        return
    import torch

    # The tests of our own kernels run on a GPU as well.
    anywhere = "test_triton_" if torch.cuda.is_available() else "no file"
    skip = pytest.mark.skip(reason=f"needs a process of its own: {COMMAND}")
    for item in items:
        if HERE in item.path.parents and not item.path.name.startswith(anywhere):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> Iterator[None]:
    """Seeded inputs, and sums in one order: one thread, which also leaves the other cores to other tests."""
    import torch

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
