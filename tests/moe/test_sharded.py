"""Experts in parts, FSDP2 and LoRA together, in two and in four processes.

The cases are in ``tests/support/sharded_cases.py`` and ``sharded_curves.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from torch import distributed

from tests.support.processes import backend_for, check, problems
from tests.support.sharded_cases import CASES
from tests.support.sharded_curves import CURVES

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch was built without torch.distributed"),
]

SHARDED = "tests.support.sharded_cases"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(world: int, tmp_path: Path) -> None:
    """The last process of all is killed in the end, and the others notice."""
    found = problems(tmp_path, world, f"{SHARDED}:CASES", f"{SHARDED}:death")
    assert len(found) == world * len(CASES) + world - 1
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_curves(world: int, tmp_path: Path) -> None:
    """Twenty steps of every layout are those of one process; so are those after a checkpoint, either way.

    On GPUs where there are enough, over NCCL.
    """
    found = problems(tmp_path, world, "tests.support.sharded_curves:CURVES", backend=backend_for(world))
    assert len(found) == world * len(CURVES) >= 18
    check(found)
