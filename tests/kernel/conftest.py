"""Fixtures of the tests that break things."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support import toys
from tests.support.fragile import ROPE, loopback
from tests.support.hub_repository import write_kernel
from tests.support.snapshots import unchanged
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


@pytest.fixture
def model() -> Iterator[toys.ToyModel]:
    """A toy model that is after the test, and after an undo, what it was before; so is all that others share."""
    with unchanged(toys.toy(), toys.toy_input()) as made:
        yield made


@pytest.fixture
def other() -> Iterator[toys.ToyModel]:
    """A second model that is kernelized before; what it has it keeps."""
    made = toys.toy(seed=3)
    kernelize(made, {toys.ToyNorm: loopback("rms_norm"), ROPE: loopback("rotary")})
    with unchanged(made, toys.toy_input(), undo=False):
        yield made
    assert [row.state for row in report(made).rows] == ["installed", "installed"]
    unkernelize(made)


@pytest.fixture
def qwen3() -> Iterator[nn.Module]:
    """A small Qwen3, of which the same holds; files of which other things are asked have one of their own."""
    made = presets.build("qwen3", num_hidden_layers=1)
    with unchanged(made, **presets.inputs(made)):
        yield made


@pytest.fixture
def untouched(qwen3: nn.Module) -> Iterator[None]:
    """The model is after the test what it was before, and its report says that nothing is installed."""
    with unchanged(qwen3, undo=False, **presets.inputs(qwen3)):
        yield
        assert report(qwen3).rows == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """``me/toy``, found on this machine's disk."""
    name = f"toy_kernels_{abs(hash(tmp_path))}"
    write_kernel(tmp_path / "toy" / "build" / "torch-cpu", name)
    monkeypatch.setenv("LOCAL_KERNELS", f"me/toy={tmp_path / 'toy'}")
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture
def rope() -> Callable[..., Any]:
    """Qwen3's rotary function before a test replaces it."""
    from transformers.models.qwen3 import modeling_qwen3

    return modeling_qwen3.apply_rotary_pos_emb
