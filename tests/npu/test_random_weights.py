"""A model to measure or verify, whose weights are drawn on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twinkle.commands.models import find_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize("device", ["npu", "npu:0"])
def test_the_same_weights_every_time_and_nobody_elses_random_numbers(device: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    module = torch.get_device_module("npu")
    made = []
    for _ in range(2):
        torch.rand(3)  # somebody else's
        before = torch.get_rng_state(), module.get_rng_state()
        made.append(find_model(str(tmp_path)).with_random_weights(torch.float32, device))
        assert all(map(torch.equal, before, (torch.get_rng_state(), module.get_rng_state())))
    first, second = made
    assert {parameter.device.type for parameter in first.parameters()} == {"npu"}
    for ours, again in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours.cpu(), again.cpu())
