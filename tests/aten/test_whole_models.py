"""Whole models with all operators installed at once: nothing changes, and each operator that they call was hit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle import presets
from twinkle.aten import Profile, catalog
from twinkle.aten.installation import Installation
from twinkle.aten.registration import Registration

pytestmark = pytest.mark.skipif(INTERPRETED, reason="a model has too many elements for the interpreter")

CALLED = {"clone", "contiguous", "copy_", "detach", "empty_like", "empty_strided", "item", "_local_scalar_dense"}
"""By a training step and a generation of these models. No dropout is set, and their norms don't use ``type_as``."""
TEN = sorted({*CALLED, "dropout", "type_as"})


def install_ten(chip: Profile, counters: dict[str, dict[str, int]]) -> Installation:
    made: dict[str, Registration] = {}
    for name in TEN:
        made[name] = catalog.operator(name).register_a1(counter=counters.setdefault(name, {}), platform=chip.platform)
    return Installation(made)


def work(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a training step, then the tokens of a generation."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = presets.loss(model.train()(**batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    tokens = model.eval().generate(batch["input_ids"], max_new_tokens=6, do_sample=False)
    return {"loss": loss.detach(), "tokens": tokens, **found}


@pytest.mark.parametrize("preset", ["qwen3", "llama"])
def test_all_ten_at_once(preset: str, chip: Profile) -> None:
    model = presets.build(preset, device=DEVICE)  # built first: with detach installed it couldn't be
    batch = presets.inputs(model, device=DEVICE)
    native = work(model, batch)
    counters: dict[str, dict[str, int]] = {}
    with install_ten(chip, counters) as installed:
        ours = work(model, batch)
        counts = {name: registration.counts for name, registration in installed.registrations.items()}
    assert list(ours) == list(native) and len(native) > 20
    assert [name for name in native if not torch.equal(ours[name], native[name])] == []
    assert {name for name, found in counts.items() if found.kernel > 0} == CALLED
    assert {name for name, counter in counters.items() if counter["n"] > 0} == CALLED
    assert all(found.errors == 0 and "delegated" not in found.fallbacks for found in counts.values())
    again = work(model, batch)
    assert all(torch.equal(again[name], native[name]) for name in native)


def test_dropout_and_type_as_where_a_model_calls_them(chip: Profile) -> None:
    settings = {"attention_dropout": 0.1, "attn_implementation": "eager"}
    model = presets.build("gemma3", dtype=torch.bfloat16, device=DEVICE, **settings)
    batch = presets.inputs(model, device=DEVICE)
    native = work(model, batch)
    with install_ten(chip, {}) as installed:
        ours, again = work(model, batch), work(model, batch)
        served = {name for name, registration in installed.registrations.items() if registration.counts.kernel > 0}
    assert served == {*CALLED, "dropout", "type_as"}
    assert all(torch.equal(ours[name], again[name]) for name in ours), "the same seed, another model"
    # On the CPU the kernel that is made of PyTorch's operators draws what PyTorch draws.
    assert DEVICE != "cpu" or all(torch.equal(ours[name], native[name]) for name in native)
    assert torch.isfinite(ours["loss"])
