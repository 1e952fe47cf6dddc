"""Parts of models that are easily taken for something else, and models of one process that get different kernels."""

from __future__ import annotations

import copy
import gc
import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.activations import ACT2FN

from tests.support.models import (
    clean_process,  # noqa: F401
    differences,
    look,
    mapping,
    rows_of,
    same_bits,
    step,
)
from twinkle import presets
from twinkle.kernel import kernelize, registry
from twinkle.kernel.journal import patch_of
from twinkle.kernel.ops.derived import reference_impl
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

LLAMA_ROPE = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"


@pytest.fixture
def second_backend():
    """A backend besides loopback that computes the same."""
    registry.register_backend_for_every_op("loopback2", reference_impl)
    yield "loopback2"
    registry.unregister_backend_for_every_op("loopback2")


def modeling(model):
    return sys.modules[type(model).__module__]


def assert_within_judgement(model, original):
    inputs = presets.inputs(model)
    assert [c for c in compare_models(original, model, inputs, presets.loss) if c.used > 1] == []


# --- norms and MLPs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset, owner, without_weight",
    [
        ("gemma4", "Gemma4RMSNorm", 5),
        ("llama4", "Llama4TextL2Norm", 1),
        ("deepseek_v4", "DeepseekV4UnweightedRMSNorm", 7),
    ],
)
def test_norms_without_weight_get_a_kernel_without_weight(preset, owner, without_weight):
    model = presets.build(preset)
    norms = [m for m in model.modules() if type(m).__name__ == owner and not list(m.parameters())]
    assert len(norms) == without_weight
    original = copy.deepcopy(model)
    kernelize(model, mapping("loopback", owner))
    assert all(installed_on(type(norm)) for norm in norms)
    assert_within_judgement(model, original)
    row = rows_of(model)[f"{preset}.{owner}"]
    assert row.calls >= row.instances and row.fallbacks == {}
    unkernelize(model)


@pytest.mark.parametrize("preset, owner", [("phi3", "Phi3MLP"), ("glm4", "Glm4MLP"), ("glm", "GlmMLP")])
def test_fused_projections(preset, owner):
    model = presets.build(preset)
    mlps = [m for m in model.modules() if type(m).__name__ == owner]
    assert {tuple(mlp._modules) for mlp in mlps} == {("gate_up_proj", "down_proj", "activation_fn")}
    original = copy.deepcopy(model)
    kernelize(model, mapping("loopback", f"{owner}.forward"))
    assert rows_of(model)[f"{preset}.{owner}.forward"].instances == len(mlps) == 2
    assert_within_judgement(model, original)
    unkernelize(model)


@pytest.mark.parametrize(
    "preset, target, activation, named",
    [
        ("llama", "llama.LlamaMLP.forward", "gelu", "gelu"),
        ("llama", "llama.LlamaMLP.forward", "gelu_pytorch_tanh", "gelu_tanh"),
        ("llama", "llama.LlamaMLP.forward", "relu", "relu"),
        ("llama", "llama.LlamaMLP.forward", "sigmoid", "sigmoid"),
        ("phi3", "phi3.Phi3MLP.forward", "gelu", "gelu"),
        ("gemma2", "gemma2.Gemma2MLP.forward", "silu", "silu"),
        ("qwen3_moe", "qwen3_moe.Qwen3MoeMLP.forward", "gelu", "gelu"),
    ],
)
def test_another_activation_is_refused_by_name(preset, target, activation, named):
    setting = "hidden_activation" if preset == "gemma2" else "hidden_act"
    model = presets.build(preset, **{setting: activation})
    before = step(model)
    kernelize(model, mapping("loopback", f"{preset}."))
    row = rows_of(model)[target]
    assert row.state == "refused" and f"the activation is {named}, " in row.why()
    assert rows_of(model)[f"{preset}.apply_rotary_pos_emb"].state == "installed"
    assert not any(installed_on(type(m)) for m in model.modules() if type(m).__name__.endswith("MLP"))
    torch.testing.assert_close(step(model)["logits"], before["logits"], rtol=1e-4, atol=1e-5)
    unkernelize(model)


def test_of_one_class_only_the_instance_with_silu_changes():
    model = presets.build("llama")
    model.model.layers[0].mlp.act_fn = ACT2FN["gelu"]
    original = copy.deepcopy(model)
    kernelize(model, mapping("loopback", "LlamaMLP.forward"))
    gelu, silu = (layer.mlp for layer in model.model.layers)
    assert installed_on(type(gelu)) is None and installed_on(type(silu)) is not None
    rows = {row.state: row for row in report(model).rows}
    assert {state: row.instances for state, row in rows.items()} == {"installed": 1, "refused": 1}
    assert "the activation is gelu" in rows["refused"].why()
    assert_within_judgement(model, original)
    assert rows["installed"].calls == 1
    unkernelize(model)


# --- rotary -----------------------------------------------------------------------------------------------------------


def same(results, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(results, expected)
    return len(results) == len(expected) and all(map(torch.equal, results, expected))


def _heads(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "preset, tensors, table, options",
    [
        ("llama", 2, 16, {}),  # all of the head turns, halves are paired
        ("phi3", 2, 8, {}),  # half of it, the rest passes through
        ("glm4", 2, 8, {}),  # half of it, neighbours are paired
        ("qwen3_5", 2, 4, {}),  # a quarter
        ("cohere2", 2, 16, {}),  # neighbours, in fp32
        ("gemma4", 1, 16, {"unsqueeze_dim": 2}),  # one tensor a call
        ("deepseek_v4", 1, 4, {}),  # one tensor, its last channels, half a table
        ("gpt_oss", 2, 8, {}),  # half a table
    ],
)
def test_rotary_dialects(preset, tensors, table, options):
    """The function, called on its own in fp64, gives what the original gives; by position and by name."""
    model = presets.build(preset)
    original = modeling(model).apply_rotary_pos_emb
    kernelize(model, mapping("loopback", f"{preset}.apply_rotary_pos_emb"))
    ours = modeling(model).apply_rotary_pos_emb
    assert ours is not original

    shape = (2, 5, 4, 16) if options.get("unsqueeze_dim") == 2 else (2, 4, 5, 16)
    heads = [_heads(*shape, seed=i) for i in range(tensors)]
    cos, sin = _heads(2, 5, table, seed=8), _heads(2, 5, table, seed=9)
    results, expected = ours(*heads, cos=cos, sin=sin, **options), original(*heads, cos, sin, **options)
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-6)  # some compute in fp32
    assert rows_of(model)[f"{preset}.apply_rotary_pos_emb"].calls == 1
    unkernelize(model)
    assert modeling(model).apply_rotary_pos_emb is original
    assert same(ours(*heads, cos, sin, **options), expected)  # whoever still holds ours gets the original


@pytest.mark.parametrize("preset", ["phi3", "glm4"])
def test_partial_rotary_in_a_model(preset):
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    model = presets.build(preset, rope_parameters=rope)
    original = copy.deepcopy(model)
    kernelize(model, mapping("loopback", f"{preset}.apply_rotary_pos_emb"))
    assert_within_judgement(model, original)
    assert rows_of(model)[f"{preset}.apply_rotary_pos_emb"].calls == 2
    unkernelize(model)


def test_deepseek_v3_calls_the_rotary_of_its_configuration():
    model = presets.build("deepseek_v3", rope_interleave=False)
    original = copy.deepcopy(model)
    kernelize(model, mapping("loopback", "deepseek_v3."))
    assert_within_judgement(model, original)
    rows = rows_of(model)
    assert rows["deepseek_v3.apply_rotary_pos_emb"].calls == 2
    assert rows["deepseek_v3.apply_rotary_pos_emb_interleave"].calls == 0
    unkernelize(model)


def test_the_judgement_sees_a_wrong_function():
    """A replaced function serves the original model too; it must be judged without it."""
    model = presets.build("llama")
    original, rope = copy.deepcopy(model), modeling(model).apply_rotary_pos_emb

    def too_large(q, k, cos, sin, unsqueeze_dim=1):
        q, k = rope(q, k, cos, sin, unsqueeze_dim)
        return 1.001 * q, k

    kernelize(model, {LLAMA_ROPE: too_large})
    assert [c for c in compare_models(original, model, presets.inputs(model), presets.loss) if c.used > 1] != []
    assert modeling(model).apply_rotary_pos_emb is not rope
    unkernelize(model)
    assert modeling(model).apply_rotary_pos_emb is rope


# --- several models of one process ------------------------------------------------------------------------------------


def test_two_models_of_one_class_kernelized_differently():
    ours, plain = presets.build("qwen3"), presets.build("qwen3")
    before, bits = look(plain), step(plain)
    kernelize(ours, mapping("loopback", "Qwen3RMSNorm", "Qwen3MLP.forward"))
    assert differences(before, look(plain)) == [] and same_bits(step(plain), bits)
    step(ours)
    kernelize(plain, mapping("loopback", "Qwen3MLP.forward"))
    step(plain)
    assert {t: (r.instances, r.calls) for t, r in rows_of(ours).items()} == {
        "qwen3.Qwen3RMSNorm": (9, 9),
        "qwen3.Qwen3MLP.forward": (2, 2),
    }
    assert {t: (r.instances, r.calls) for t, r in rows_of(plain).items()} == {"qwen3.Qwen3MLP.forward": (2, 2)}
    unkernelize(ours)
    assert rows_of(plain)["qwen3.Qwen3MLP.forward"].instances == 2
    unkernelize(plain)
    assert differences(before, look(plain)) == []


def test_a_function_shared_by_two_models_returns_with_the_last():
    first, second = presets.build("llama"), presets.build("llama")
    original = modeling(first).apply_rotary_pos_emb
    for model in (first, second):
        kernelize(model, mapping("loopback", "llama."))
    ours = modeling(first).apply_rotary_pos_emb
    assert ours is not original
    step(first)
    # The calls of a process-wide function can't be told apart.
    assert [rows_of(model)["llama.apply_rotary_pos_emb"].calls for model in (first, second)] == [2, 2]
    assert rows_of(second)["llama.LlamaRMSNorm"].calls == 0

    assert unkernelize(first).not_undone == ()
    assert modeling(first).apply_rotary_pos_emb is ours
    step(second)
    assert rows_of(second)["llama.apply_rotary_pos_emb"].calls == 4
    unkernelize(second)
    assert modeling(first).apply_rotary_pos_emb is original


def test_another_backend_for_a_shared_function_is_a_reason(second_backend):
    first, second = presets.build("llama"), presets.build("llama")
    kernelize(first, mapping("loopback", "llama."))
    ours = modeling(first).apply_rotary_pos_emb
    kernelize(second, mapping(second_backend, "llama."))
    rows = rows_of(second)
    assert rows["llama.LlamaRMSNorm"].backend == second_backend
    refused = rows["llama.apply_rotary_pos_emb"]
    assert refused.state == "refused" and "already serves another model with backend loopback" in refused.why()
    assert modeling(first).apply_rotary_pos_emb is ours

    unkernelize(first)  # with the first model undone the second can have it
    kernelize(second, mapping(second_backend, "llama."))
    assert rows_of(second)["llama.apply_rotary_pos_emb"].backend == second_backend
    unkernelize(second)


def test_a_function_returns_when_its_last_model_is_collected(second_backend):
    first, second = presets.build("llama"), presets.build("llama")
    home, original = modeling(first), modeling(first).apply_rotary_pos_emb
    for model in (first, second):
        kernelize(model, mapping("loopback", "llama."))
    ours = home.apply_rotary_pos_emb
    del model, first
    gc.collect()
    assert home.apply_rotary_pos_emb is ours
    del second
    gc.collect()
    assert home.apply_rotary_pos_emb is original and patch_of(home, "apply_rotary_pos_emb") is None

    third = kernelize(presets.build("llama"), mapping(second_backend, "llama."))
    assert rows_of(third)["llama.apply_rotary_pos_emb"].backend == second_backend
    unkernelize(third)


def test_files_that_hold_a_function_by_an_import_are_named(monkeypatch):
    model = presets.build("llama")
    for name, attribute in (("holds_it", "apply_rotary_pos_emb"), ("holds_it_by_another_name", "rope")):
        holder = types.ModuleType(name)
        setattr(holder, attribute, modeling(model).apply_rotary_pos_emb)
        monkeypatch.setitem(sys.modules, name, holder)
    kernelize(model, mapping("loopback", "llama."))
    row = rows_of(model)["llama.apply_rotary_pos_emb"]
    assert row.notes == ["these hold the original by an import and keep calling it: holds_it, holds_it_by_another_name"]
    unkernelize(model)
