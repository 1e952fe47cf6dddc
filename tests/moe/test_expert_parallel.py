"""Expert parallelism of two and of four processes; the cases are in ``tests/support/expert_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import distributed

from tests.support.expert_cases import CASES
from tests.support.processes import check, problems

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch was built without torch.distributed"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_processes(world: int, tmp_path: Path) -> None:
    found = problems(tmp_path, world, "tests.support.expert_cases:CASES")
    assert len(found) == world * len(CASES) >= 26
    check(found)
