"""These tests run on one device per process: the CPU, the simulated out-of-tree device under either of its names, or a
real one by the name of its profile.

    TWINKLE_TEST_DEVICE=npu TRITON_INTERPRET=1 python -m pytest tests/aten
    TWINKLE_TEST_DEVICE=cuda python -m pytest tests/aten

The simulated device would be the accelerator of every other test in its process, so ``make test-aten`` gives it
processes of its own. With TRITON_INTERPRET, or where Triton has a backend, the operators' Triton kernels run; else
those made of ATen operators.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import simulated_device
from twinkle.aten import Profile, catalog, profile, scaffold
from twinkle.aten.availability import triton_missing
from twinkle.aten.registration import active
from twinkle.aten.routes import every_size
from twinkle.aten.spec import OperatorSpec

PROFILE = os.environ.get("TWINKLE_TEST_DEVICE", "cpu")
DEVICE = profile(PROFILE).device.removesuffix(":0")
SIMULATED = PROFILE in simulated_device.PLUGINS
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = INTERPRETED or not (SIMULATED or DEVICE == "cpu" or triton_missing(profile(PROFILE).found))
"""Whether it is the operators' Triton kernels that run."""
ROOT = Path(__file__).parents[2]

if SIMULATED:
    simulated_device.load(DEVICE)
if INTERPRETED:
    from tests.support.triton_interpreter import install

    install()


def pytest_configure(config: pytest.Config) -> None:
    # Triton 3.6 converts arrays of one element to numbers, which numpy is about to forbid.
    ignored = "ignore:Conversion of an array:DeprecationWarning:triton.runtime.interpreter"
    config.addinivalue_line("filterwarnings", ignored)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = [catalog.operator(name) for name in catalog.names()]
    registrable = [spec for spec in every if spec.by_design is None]
    for name, specs in (("spec", every), ("registrable", registrable)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, specs, ids=[spec.name for spec in specs])


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """No test leaves an operator registered."""
    torch.manual_seed(0)
    with every_size():  # what is tested are kernels, whoever is faster; routes have tests of their own
        yield
    left = active()
    for registration in left:
        registration.close()
    assert not left


@pytest.fixture
def chip() -> Profile:
    """The profile of the device that this process tests."""
    return profile(PROFILE)


@pytest.fixture
def clone() -> OperatorSpec:
    """An operator for tests that need any."""
    return catalog.operator("clone")


@pytest.fixture
def newly_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], OperatorSpec]]:
    """Makes an operator's package as ``ops new`` does, from a schema, and gives its spec."""
    package = "newly_made_ops"
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(schema: str) -> OperatorSpec:
        name = schema.partition("(")[0].partition(".")[0]
        scaffold.make(scaffold.overload_of(name, schema), tmp_path / package)
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.{name}.register").SPEC

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        del sys.modules[module]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment for a further process that has the same device."""
    path = [str(simulated_device.autoload(tmp_path, DEVICE))] if SIMULATED else []
    path += [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
