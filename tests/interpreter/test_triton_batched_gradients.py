"""Gradients under ``vmap``, whose tensors no kernel can read: the backwards go by the formula."""

from __future__ import annotations

import pytest

from tests.support.batched_gradients import assert_same_gradients
from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import DEVICE

DENSE = ("rms_norm", "rotary", "swiglu", "causal_lm_loss")


@pytest.mark.parametrize(
    ("preset", "ops"),
    [
        ("qwen3", DENSE),
        ("qwen3", ("qk_norm_rotary", "add_rms_norm")),
        ("phi3", ("swiglu",)),
        ("qwen3_next", ("moe_experts", "moe_router", "moe_block")),
        ("qwen3_next", ("gated_rms_norm",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_several_gradients_at_once(preset: str, ops: tuple[str, ...]) -> None:
    assert_same_gradients(preset, "triton", *ops, device=DEVICE)
