"""Functions that the package kernels makes modules of, in its window and outside of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("kernels")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support.hub_repository import ROTARY
from twinkle.kernel import KernelChoice
from twinkle.kernel.undo import kernelized

pytestmark = pytest.mark.usefixtures("loopback")


ROOT = Path(__file__).parents[2]


def test_a_function_that_is_a_module() -> None:
    """With kernels in the window that transformers accepts, decorated functions are module singletons."""
    assert isinstance(modeling_qwen3.apply_rotary_pos_emb, nn.Module)
    assert FUNCTION_CHECK() == {**RIGHT, "module": True}


CHECK = """
def check():
    import torch
    from torch import nn
    from transformers.models.qwen3 import modeling_qwen3
    from twinkle import presets
    from twinkle.kernel import KernelChoice, kernelize
    from twinkle.kernel.report import report
    from twinkle.kernel.testing import register_test_backends
    from twinkle.kernel.undo import unkernelize

    register_test_backends()
    original = modeling_qwen3.apply_rotary_pos_emb
    model = presets.build("qwen3")
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    with torch.no_grad():
        before = model(**presets.inputs(model)).logits
        key = f"{modeling_qwen3.__name__}.apply_rotary_pos_emb"
        kernelize(model, {key: KernelChoice("rotary", ("loopback",))}, verify=True)
        (row,) = report(model).rows
        after = model(**presets.inputs(model)).logits
    assert modeling_qwen3.apply_rotary_pos_emb is not original
    assert names == ([name for name, _ in model.named_modules()], list(model.state_dict()))
    unkernelize(model)
    return {"module": isinstance(original, nn.Module), "state": row.state, "calls": row.calls,
            "same": torch.allclose(before, after, atol=1e-5), "undone": modeling_qwen3.apply_rotary_pos_emb is original}
"""
RIGHT = {"state": "installed", "calls": 2, "same": True, "undone": True}
_namespace: dict[str, Any] = {}
exec(CHECK, _namespace)
FUNCTION_CHECK = _namespace["check"]

HIDE = """
import importlib.util
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kernels":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "kernels" else find_spec(name, *package)
"""


@pytest.mark.parametrize(
    ("environment", "prelude"), [({"USE_HUB_KERNELS": "0"}, ""), ({}, HIDE)], ids=["opted out", "not importable"]
)
def test_a_function_that_is_a_function(environment: dict[str, str], prelude: str) -> None:
    code = f"{prelude}\n{CHECK}\nimport json\nprint(json.dumps(check()))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {**RIGHT, "module": False}


def test_hf_kernels_replacing_the_same_function_is_seen(qwen3: nn.Module) -> None:
    """Our router goes around the singleton, so what HF kernels binds to it later is its original."""
    original = modeling_qwen3.apply_rotary_pos_emb
    with kernelized(qwen3, {ROTARY: KernelChoice("rotary", ("loopback",))}):
        assert modeling_qwen3.apply_rotary_pos_emb is not original
        q = torch.ones(1, 1, 2, 4)
        table = torch.ones(1, 2, 4)
        rotated = modeling_qwen3.apply_rotary_pos_emb(q, k=q, cos=table, sin=table)
        assert torch.equal(rotated[0], original(q, q, table, table)[0])
    assert modeling_qwen3.apply_rotary_pos_emb is original
