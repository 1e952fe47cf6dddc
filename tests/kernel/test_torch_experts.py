"""Experts by PyTorch's grouped product: every layout, gate, choice and dtype, both ways; whole models; the registry."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tests.support.experts import (
    FAMILIES,
    assert_leaves_some_calls_to_the_original,
    assert_only_wanted_gradients,
    assert_serves_a_family,
    assert_within_the_judgement,
    made,
    mapping,
    results,
    variants,
)
from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import DEVICE, DTYPES, examples
from twinkle import presets
from twinkle.commands.comparison import judge
from twinkle.kernel import kernelize
from twinkle.kernel.ops.moe import torch as backend
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant, moe_experts
from twinkle.kernel.ops.moe.transformers_registry import register_experts_functions, unregister_experts_functions
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

SIZES = [(13, 24, 16, 5, 2), (1, 8, 8, 2, 1), (7, 16, 40, 3, 3), (40, 16, 16, 9, 8), (5, 40, 8, 1, 1)]
"""Widths of whole 16 bytes in every dtype."""


def ours(x: Any, index: Any, weights: Any, stacks: Any, variant: MoeExpertsVariant) -> torch.Tensor:
    return backend._experts_with_gradients(x, weights, *stacks, index, variant)


@examples
@given(
    variant=variants,
    sizes=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    strangers=st.booleans(),
)
@pytest.mark.parametrize("function", [ours, backend.grouped_experts], ids=["eager", "compiled"])
def test_output_and_gradients_are_within_the_judgement(
    function: Any, variant: MoeExpertsVariant, sizes: tuple[int, ...], dtype: torch.dtype, seed: int, strangers: bool
) -> None:
    inputs, index = made(variant, sizes, dtype, seed, strangers)
    found = results(function, inputs, index, variant, dtype)
    assert_within_the_judgement(found, inputs, index, variant, dtype)


@pytest.mark.parametrize("frozen", [("x", "weights"), ("gate_up", "down"), ("x", "gate_up"), ("weights", "down")])
def test_only_the_gradients_that_are_wanted(frozen: tuple[str, ...]) -> None:
    assert_only_wanted_gradients(ours, SIZES[0], frozen)


def test_its_result_can_be_added_to_in_place() -> None:
    """As blocks with a shared expert do."""
    variant = MoeExpertsVariant(Gate("silu"))
    inputs, index = made(variant, SIZES[0], torch.float32, 3, False)
    x = inputs["x"].requires_grad_()
    out = ours(x, index, inputs["weights"], (inputs["gate_up"], inputs["down"], None, None), variant)
    assert not out._is_view()
    out += x
    out.sum().backward()


def test_its_gradient_can_be_differentiated() -> None:
    variant = MoeExpertsVariant(Gate("silu"))
    inputs, index = made(variant, SIZES[0], torch.float32, 2, False)
    penalties = []
    for function in (ours, moe_experts):
        x = inputs["x"].clone().requires_grad_()
        out = function(x, index, inputs["weights"], (inputs["gate_up"], inputs["down"], None, None), variant)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*penalties, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_experts(name: str) -> None:
    assert_serves_a_family(name, "torch")


def test_under_a_compiler_it_is_seen_through() -> None:
    original = presets.build("qwen3_moe", dtype=torch.bfloat16).to(DEVICE)
    model = kernelize(copy.deepcopy(original), mapping(original, "qwen3_moe", "torch"))
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    x = torch.randn(6, experts.gate_up_proj.shape[2], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    index = torch.arange(12, device=DEVICE).view(6, 2) % 8
    weights = torch.rand(6, 2, device=DEVICE, dtype=torch.bfloat16)
    expected = experts(x, index, weights)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    found = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, index, weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], gradient, rtol=2e-2, atol=2e-2)
    (row,) = report(model).rows
    assert row.fallbacks == {}
    unkernelize(model)


def test_calls_that_are_the_originals() -> None:
    assert_leaves_some_calls_to_the_original("torch")


def test_widths_that_the_product_does_not_take_are_the_originals() -> None:
    model = presets.build("qwen3_moe", moe_intermediate_size=30).to(DEVICE)
    model.set_experts_implementation("eager")
    kernelize(model, mapping(model, "qwen3_moe", "torch"))
    model(**presets.inputs(model))
    (row,) = report(model).rows
    assert row.calls == 0
    assert set(row.fallbacks) == {"rows of the weights aren't whole 16 bytes, which PyTorch's grouped product asks for"}
    unkernelize(model)


# --- transformers' registry of experts --------------------------------------------------------------------------------


def test_another_implementation_that_the_configuration_asks_for_serves() -> None:
    """``config._experts_implementation`` still decides, after the kernel was installed too."""
    model = presets.build("qwen3_moe").to(DEVICE)
    inputs = presets.inputs(model)
    kernelize(model, mapping(model, "qwen3_moe", "torch"))
    assert model.config._experts_implementation == "grouped_mm"
    model(**inputs)
    (row,) = report(model).rows
    served = row.calls
    assert served and row.fallbacks == {}
    model.set_experts_implementation("eager")
    model(**inputs)
    (row,) = report(model).rows
    reason = "the configuration asks for the experts' implementation 'eager' now, not 'grouped_mm'"
    assert (row.calls, row.fallbacks) == (served, {reason: served})
    model.set_experts_implementation("grouped_mm")
    model(**inputs)
    assert report(model).rows[0].calls == 2 * served
    unkernelize(model)


@pytest.fixture
def registered() -> Iterator[tuple[str, ...]]:
    yield register_experts_functions()
    unregister_experts_functions()


def test_a_kernel_is_chosen_by_the_configuration(registered: tuple[str, ...]) -> None:
    """Nothing but the configuration's value is changed; also beside kernels of ``kernelize``."""
    assert "twinkle_torch" in registered
    original = presets.build("qwen3_moe").to(DEVICE)
    model = copy.deepcopy(original)
    model.set_experts_implementation("twinkle_torch")
    calls = []
    serve = backend._experts_with_gradients
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "_experts_with_gradients", lambda *args: calls.append(1) or serve(*args))
        model(**presets.inputs(model))
        original(**presets.inputs(model))
    assert len(calls) == sum(hasattr(module, "gate_up_proj") for module in model.modules()) > 0
    used = judge(original, model)
    assert max(used.values()) <= 1, used
    kernelize(original, mapping(original, "qwen3_moe", "torch"))
    original.set_experts_implementation("twinkle_torch")
    original(**presets.inputs(original))
    assert list(report(original).rows[0].fallbacks) == [
        "the configuration asks for the experts' implementation 'twinkle_torch' now, not 'grouped_mm'"
    ]
    unkernelize(original)


def test_where_it_does_not_fit_transformers_own_serves_and_a_warning_says_so(
    registered: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = presets.build("qwen3_moe").to(DEVICE)
    inputs = presets.inputs(model)
    expected = {}
    for name in ("grouped_mm", "twinkle_torch"):
        model.set_experts_implementation(name)
        for module in model.modules():
            if hasattr(module, "gate_up_proj"):
                module.act_fn = torch.nn.Mish()
        with torch.no_grad():
            expected[name] = model(**inputs).logits
    assert torch.equal(*expected.values())
    said = [record.message for record in caplog.records if record.name.startswith("twinkle")]
    assert len(said) == 1 and said[0].startswith("Qwen3MoeExperts: twinkle_torch doesn't serve it: ")


def test_a_call_that_it_refuses_is_told_once(registered: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    model = presets.build("qwen3_moe").to(DEVICE)
    model.set_experts_implementation("twinkle_torch")
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            model(**presets.inputs(model))
    (said,) = [record.message for record in caplog.records if record.name.startswith("twinkle")]
    assert said.startswith("Qwen3MoeExperts: twinkle_torch doesn't serve it: autocast would make the original")


def test_a_hook_on_the_experts_activation_is_run(registered: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    model = presets.build("qwen3_moe").to(DEVICE).eval()
    seen: list[int] = []
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    counts = []
    for name in ("grouped_mm", "twinkle_torch"):
        model.set_experts_implementation(name)
        model(**presets.inputs(model))
        counts.append(len(seen))
    assert counts[1] == 2 * counts[0] > 0
    (said,) = [record.message for record in caplog.records if record.name.startswith("twinkle")]
    assert said == "Qwen3MoeExperts: twinkle_torch doesn't serve it: its act_fn has hooks"


def test_the_registry_is_left_as_it_was() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    register_experts_functions()
    assert before != ALL_EXPERTS_FUNCTIONS._global_mapping
    unregister_experts_functions()
    assert before == ALL_EXPERTS_FUNCTIONS._global_mapping


# --- weights that change ----------------------------------------------------------------------------------------------


def _losses(model: Any, adapt: Any) -> list[float]:
    """Train, step, eval, step again; merged in between, where there are adapters."""
    model = adapt(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    found = []
    for mode in ("train", "eval", "train", "merged", "train"):
        model.train(mode == "train")
        if mode == "merged":
            model.merge_adapter()
        inputs = presets.inputs(presets.build("qwen3_moe"), seed=len(found))
        loss = presets.loss(model(**inputs))
        found.append(loss.item())
        if mode == "merged":
            model.unmerge_adapter()
        if mode == "train":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacks))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _parametrized(model: Any) -> Any:
    for module in list(model.modules()):
        if hasattr(module, "gate_up_proj"):
            torch.nn.utils.parametrize.register_parametrization(module, "gate_up_proj", _Doubled())
    model.merge_adapter = model.unmerge_adapter = lambda: None
    return model


@pytest.mark.parametrize("adapt", [_with_lora, _parametrized])
def test_weights_are_never_stale(adapt: Any) -> None:
    pytest.importorskip("peft")
    expected = _losses(presets.build("qwen3_moe"), adapt)
    model = presets.build("qwen3_moe")
    kernelize(model, mapping(model, "qwen3_moe", "torch"))
    assert _losses(model, adapt) == pytest.approx(expected, rel=1e-4)
    assert len({round(loss, 3) for loss in expected}) == len(expected)
    (row,) = report(model).rows
    assert row.fallbacks == {} and row.calls == 5 * row.instances
    unkernelize(model)
