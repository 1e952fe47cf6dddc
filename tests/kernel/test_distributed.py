"""DDP and FSDP2 around kernelized models and the other way round; the cases are in ``distributed_cases.py``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import distributed

from tests.support.distributed_cases import CASES, WORLD
from tests.support.processes import check, problems

pytestmark = pytest.mark.multiprocess


@pytest.mark.skipif(not distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes(tmp_path):
    found = problems(tmp_path, WORLD, "tests.support.distributed_cases:CASES")
    assert len(found) == WORLD * len(CASES) >= 24
    check(found)
