"""Whole tiny models through Liger's kernels, on a CPU in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.models import same_bits, step
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, journal, kernelize
from twinkle.kernel.report import report, short
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

pytestmark = pytest.mark.liger

# family -> (layers, what is installed with how many instances and calls of one step, what is refused)
FAMILIES: dict[str, tuple[int, dict[str, tuple[int, int]], set[str]]] = {
    "qwen3": (1, {"Qwen3RMSNorm": (5, 5), "Qwen3MLP.forward": (1, 1), "apply_rotary_pos_emb": (1, 1)}, set()),
    "gemma": (1, {"GemmaRMSNorm": (3, 3), "GemmaMLP.forward": (1, 1), "apply_rotary_pos_emb": (1, 1)}, set()),
    "gemma2": (2, {"Gemma2RMSNorm": (9, 9), "Gemma2MLP.forward": (2, 2), "apply_rotary_pos_emb": (1, 2)}, set()),
    "olmo2": (1, {"Olmo2RMSNorm": (5, 5), "Olmo2MLP.forward": (1, 1), "apply_rotary_pos_emb": (1, 1)}, set()),
    "glm4": (1, {"Glm4RMSNorm": (5, 5), "Glm4MLP.forward": (1, 1)}, {"apply_rotary_pos_emb"}),
    "phi3": (1, {"Phi3RMSNorm": (3, 3), "Phi3MLP.forward": (1, 1), "apply_rotary_pos_emb": (1, 1)}, set()),
    "qwen3_moe": (
        2,
        {
            **{"Qwen3MoeRMSNorm": (9, 9), "Qwen3MoeMLP.forward": (1, 1), "apply_rotary_pos_emb": (1, 2)},
            "Qwen3MoeExperts.forward": (1, 1),
        },
        set(),
    ),
}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert [patch.where for patch in journal._patches.values()] == []


def mapping(family: str) -> dict[str, KernelChoice]:
    """The default config's entries of one family that Liger has an op for, through Liger alone."""
    entries = {
        key: choice
        for key, choice in DEFAULT_KERNEL_CONFIG.items()
        if f".{family}.modeling_" in key and choice.op not in ("moe_router", "moe_block", "gated_rms_norm")
    }
    return with_backends(entries, "liger")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_within_the_judgement_and_undone_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    layers, expected, refused = FAMILIES[family]
    original = presets.build(family, dtype=dtype, num_hidden_layers=layers)
    model = copy.deepcopy(original)
    inputs = presets.inputs(model, batch=1, length=6)
    before = step(original, inputs)
    kernelize(model, mapping(family))
    compared = compare_models(original, model, inputs, presets.loss)
    rows = report(model).rows
    try:
        assert {row.state for row in rows} <= {"installed", "refused"}
        assert {short(r.target).partition(".")[2]: (r.instances, r.calls) for r in rows if r.backend} == expected
        assert {short(r.target).partition(".")[2] for r in rows if r.state == "refused"} == refused
        assert [row.fallbacks for row in rows if row.fallbacks] == []
        off = {c.name: c.used for c in compared if not c.used <= 1}
        assert off == {} and len(compared) == 1 + len(list(model.parameters()))
    finally:
        undone = unkernelize(model)
    assert undone.not_undone == ()
    assert same_bits(step(model, inputs), before)


def test_the_default_config_never_chooses_liger_for_experts() -> None:
    model = presets.build("qwen3_moe")
    kernelize(model, {k: v for k, v in DEFAULT_KERNEL_CONFIG.items() if ".qwen3_moe." in k})
    tried = report(model).row("Qwen3MoeExperts.forward").tried
    assert "liger" not in [candidate.backend for candidate in tried]
    unkernelize(model)


def test_a_gradient_that_two_branches_share_in_a_model_and_its_copy() -> None:
    """Beside a residual branch the norm's incoming gradient is the residual's too: it must not be written over."""
    model = presets.build("gemma2", num_hidden_layers=1)
    original = copy.deepcopy(model)
    kernelize(model, mapping("gemma2"))
    twin = copy.deepcopy(model)
    norms: list[Any] = [m.model.layers[0].post_feedforward_layernorm for m in (model, twin, original)]
    gradients = []
    for norm in norms:
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        y = norm(x)
        (y + x).backward(torch.ones(2, 64))
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[2])
    assert torch.equal(gradients[0], gradients[1])
    for kernelized in (twin, model):
        unkernelize(kernelized)
