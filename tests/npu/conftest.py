"""The tests of the ``npu`` backends run on an Ascend NPU or on the simulated one, in processes of their own:

    TWINKLE_TEST_DEVICE=npu python -m pytest tests/npu            # simulated, on any machine
    TWINKLE_TEST_DEVICE=ascend910 python -m pytest tests/npu      # on the chip

Without the variable none is collected: the simulated device would be the accelerator of every other test.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests import simulated_device
from tests.support.models import clean_process  # noqa: F401

DEVICE = os.environ.get("TWINKLE_TEST_DEVICE", "")
SIMULATED = DEVICE == "npu"

if SIMULATED:
    simulated_device.load("npu")
elif DEVICE != "ascend910":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Backwards run on the test's own thread: the coverage of others can't be measured."""
    torch.manual_seed(0)
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture
def called() -> Iterator[Counter[str]]:
    """How often each function of torch_npu is called in the test; the simulated package counts."""
    if not SIMULATED:
        pytest.skip("torch_npu itself doesn't count the calls of its functions")
    from tests.simulated_device import torch_npu

    torch_npu.calls.clear()
    yield torch_npu.calls
