"""The fused loss of whole models by our Triton program, and on the CPU by Liger's kernels."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import DEVICE, DTYPES
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models


def judged(name: str, backend: str, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, int]]:
    """Share of the allowed error, for the loss and every gradient that uses more than there is; and the fallbacks."""
    original = presets.build(name).to(DEVICE, dtype).train()
    mapping = {"fused_ce": KernelChoice("causal_lm_loss", (backend,))}
    model = kernelize(copy.deepcopy(original), mapping, strict=True, verify=True)
    inputs = presets.inputs(original, device=DEVICE)
    found = compare_models(original, model, inputs, lambda o: o.loss, lambda o: [("loss", o.loss)])
    (row,) = report(model).rows
    assert row.calls + sum(row.fallbacks.values()) == 1 and row.verified
    unkernelize(model)
    return {c.name: c.used for c in found if c.used > 1}, row.fallbacks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere2"])
def test_by_our_program(name: str, dtype: torch.dtype) -> None:
    assert judged(name, "triton", dtype) == ({}, {})


@pytest.mark.liger
@pytest.mark.parametrize(
    ("name", "fallbacks"),
    [("qwen3", {}), ("gemma2", {}), ("cohere2", {"Liger's loss doesn't scale logits": 1})],
)
def test_by_liger(name: str, fallbacks: dict[str, int]) -> None:
    assert judged(name, "liger", torch.float32) == ({}, fallbacks)
