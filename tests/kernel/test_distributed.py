"""DDP and FSDP2 around kernelized models and the other way round; the cases are in ``distributed_cases.py``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import distributed, multiprocessing

from tests.support.distributed_cases import CASES, WORLD, worker

pytestmark = pytest.mark.multiprocess


@pytest.mark.skipif(not distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes(tmp_path):
    """All cases in one pair of processes: starting them takes longer than the cases do."""
    multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=WORLD)
    outcomes = {}
    for number, case in enumerate(CASES):
        for rank in range(WORLD):
            file = tmp_path / f"{number}.{rank}"
            outcomes[f"{case}, process {rank}"] = file.read_text() if file.exists() else "was not reached"
    assert len(outcomes) == WORLD * len(CASES) >= 24
    assert {case: problem for case, problem in outcomes.items() if problem} == {}
