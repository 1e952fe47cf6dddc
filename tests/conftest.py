"""Fixtures shared by all tests: each leaves the process as it found it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# Property tests draw the same each time, so that a failure is there again; the long run looks for what nobody has seen.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
if "TWINKLE_TEST_EXAMPLES" not in os.environ:
    hypothesis.settings.load_profile("same")

# The models are too small for more, and equal bits shouldn't depend on how sums are split among threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from twinkle.kernel import plugins, registry
from twinkle.kernel.testing import register_test_backends, unregister_test_backends


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """Random ones are the same at each run, whatever ran before: so is a failure."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def small_inputs_are_taken() -> Iterator[None]:
    """For what a kernel is too slow for is not what most tests are about."""
    from twinkle.kernel.ops.worthwhile import every_size

    with every_size():
        yield


@pytest.fixture
def loopback() -> Iterator[None]:
    """The test backends ``loopback`` (an op's reference) and ``refuse`` (always a reason), for every op."""
    register_test_backends()
    yield
    unregister_test_backends()


@pytest.fixture
def own_registry() -> Iterator[None]:
    """A test may register ops, backends and plug-ins; what was known before is known again afterwards."""
    registry.ops()
    implementations = {name: dict(op.implementations) for name, op in registry._OPS.items()}
    known, derived, loaded = dict(registry._OPS), dict(registry._EVERY_OP), set(plugins._loaded)
    yield
    registry._OPS.clear()
    registry._OPS.update(known)
    for name, op in known.items():
        op.implementations.clear()
        op.implementations.update(implementations[name])
    registry._EVERY_OP.clear()
    registry._EVERY_OP.update(derived)
    plugins._loaded.clear()
    plugins._loaded.update(loaded)
    plugins._errors = None


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """A trainer sets up accelerate, once for a whole process; afterwards it can be set up otherwise."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
