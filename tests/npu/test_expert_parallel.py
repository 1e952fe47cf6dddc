"""``moe_experts`` by torch_npu under expert parallelism: it serves each process's own experts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.npu.conftest import SIMULATED
from tests.support.processes import check, problems

pytestmark = pytest.mark.multiprocess


@pytest.mark.skipif(not SIMULATED, reason="on NPUs, run the cookbook's scripts")
def test_two_processes_share_the_experts(tmp_path: Path) -> None:
    found = problems(tmp_path, 2, "tests.support.npu_expert_cases:CASES")
    assert len(found) >= 4
    check(found)
