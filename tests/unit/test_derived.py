"""The backend ``inductor``: where it is available, and how often it compiles."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize, registry
from twinkle.kernel.ops import derived

NORM = "transformers.models.llama.modeling_llama.LlamaRMSNorm"


def reason() -> str:
    found = registry.availability(derived.inductor_impl(registry.get_op("rms_norm")))
    return str(found)


def test_without_a_compiler_or_headers_it_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(derived.shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert reason() == "None"
    (tmp_path / "Python.h").unlink()
    assert "Python's C headers are missing" in reason() and "install python3-dev" in reason()
    monkeypatch.setattr(derived.shutil, "which", lambda name: None)
    assert "no C++ compiler found" in reason() and "install g++" in reason()


def test_what_other_models_compiled_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    models = [presets.build("llama", num_hidden_layers=1) for _ in range(10)]  # the compiler's limit is 8 variants
    for model in models:
        kernelize(model, {NORM: replace(DEFAULT_KERNEL_CONFIG[NORM], backends=("inductor",))})
        model(**presets.inputs(model))
    assert counters["stats"]["unique_graphs"] == len(models)
    assert not counters["unimplemented"]
