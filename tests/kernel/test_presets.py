"""The tiny models: every family builds, runs forward and backward and really calls what kernels replace."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from twinkle import presets

NAMES = list(presets.PRESETS)

# Norms, MLPs, expert and router classes that a forward call must reach, and the rotary functions of the same file.
EXPECTED = {
    "llama": "LlamaRMSNorm LlamaMLP apply_rotary_pos_emb",
    "mistral": "MistralRMSNorm MistralMLP apply_rotary_pos_emb",
    "ministral": "MinistralRMSNorm MinistralMLP apply_rotary_pos_emb",
    "ministral3": "Ministral3RMSNorm Ministral3MLP apply_rotary_pos_emb",
    "qwen2": "Qwen2RMSNorm Qwen2MLP apply_rotary_pos_emb",
    "qwen3": "Qwen3RMSNorm Qwen3MLP apply_rotary_pos_emb",
    "smollm3": "SmolLM3RMSNorm SmolLM3MLP apply_rotary_pos_emb",
    "ernie4_5": "Ernie4_5RMSNorm Ernie4_5MLP apply_rotary_pos_emb",
    "olmo2": "Olmo2RMSNorm Olmo2MLP apply_rotary_pos_emb",
    "olmo3": "Olmo3RMSNorm Olmo3MLP apply_rotary_pos_emb",
    "exaone4": "Exaone4RMSNorm Exaone4MLP apply_rotary_pos_emb",
    "granite": "GraniteRMSNorm GraniteMLP apply_rotary_pos_emb",
    "phi3": "Phi3RMSNorm Phi3MLP apply_rotary_pos_emb",
    "glm": "GlmRMSNorm GlmMLP apply_rotary_pos_emb",
    "glm4": "Glm4RMSNorm Glm4MLP apply_rotary_pos_emb",
    "phi4": "Phi4MultimodalRMSNorm Phi4MultimodalMLP apply_rotary_pos_emb",
    "cohere2": "Cohere2LayerNorm Cohere2MLP apply_rotary_pos_emb",
    "starcoder2": "LayerNorm Starcoder2MLP apply_rotary_pos_emb",
    "gemma": "GemmaRMSNorm GemmaMLP apply_rotary_pos_emb",
    "gemma2": "Gemma2RMSNorm Gemma2MLP apply_rotary_pos_emb",
    "gemma3": "Gemma3RMSNorm Gemma3MLP apply_rotary_pos_emb",
    "gemma3n": "Gemma3nRMSNorm Gemma3nTextMLP apply_rotary_pos_emb",
    "gemma4": "Gemma4RMSNorm Gemma4TextMLP Gemma4TextExperts Gemma4TextRouter apply_rotary_pos_emb",
    "mixtral": "MixtralRMSNorm MixtralExperts MixtralSparseMoeBlock MixtralTopKRouter apply_rotary_pos_emb",
    "gpt_oss": "GptOssRMSNorm GptOssMLP GptOssExperts GptOssTopKRouter apply_rotary_pos_emb",
    "qwen3_moe": "Qwen3MoeRMSNorm Qwen3MoeMLP Qwen3MoeExperts Qwen3MoeSparseMoeBlock Qwen3MoeTopKRouter "
    "apply_rotary_pos_emb",
    "qwen3_next": "Qwen3NextRMSNorm Qwen3NextRMSNormGated Qwen3NextMLP Qwen3NextExperts Qwen3NextSparseMoeBlock "
    "Qwen3NextTopKRouter Qwen3NextGatedDeltaNet apply_rotary_pos_emb",
    "glm4_moe": "Glm4MoeRMSNorm Glm4MoeMLP Glm4MoeExperts Glm4MoeMoE Glm4MoeTopkRouter apply_rotary_pos_emb",
    "llama4": "Llama4TextRMSNorm Llama4TextL2Norm Llama4TextMLP Llama4TextExperts Llama4TextMoe Llama4Router "
    "apply_rotary_emb",
    "deepseek_v3": "DeepseekV3RMSNorm DeepseekV3MLP DeepseekV3Experts DeepseekV3MoE DeepseekV3TopkRouter "
    "apply_rotary_pos_emb_interleave",
    "deepseek_v4": "DeepseekV4RMSNorm DeepseekV4UnweightedRMSNorm DeepseekV4MLP DeepseekV4Experts "
    "DeepseekV4SparseMoeBlock DeepseekV4TopKRouter DeepseekV4HashRouter apply_rotary_pos_emb",
    "qwen2_vl": "Qwen2VLRMSNorm LayerNorm Qwen2MLP apply_rotary_pos_emb apply_rotary_pos_emb_vision",
    "qwen2_5_vl": "Qwen2_5_VLRMSNorm Qwen2MLP Qwen2_5_VLMLP apply_rotary_pos_emb apply_rotary_pos_emb_vision",
    "qwen3_vl": "Qwen3VLTextRMSNorm LayerNorm Qwen3VLTextMLP Qwen3VLVisionMLP apply_rotary_pos_emb "
    "apply_rotary_pos_emb_vision",
    "qwen3_vl_moe": "Qwen3VLMoeTextRMSNorm LayerNorm Qwen3VLMoeTextMLP Qwen3VLMoeVisionMLP Qwen3VLMoeTextExperts "
    "Qwen3VLMoeTextSparseMoeBlock Qwen3VLMoeTextTopKRouter apply_rotary_pos_emb apply_rotary_pos_emb_vision",
    "qwen3_5": "Qwen3_5RMSNorm Qwen3_5RMSNormGated LayerNorm Qwen3_5MLP Qwen3_5VisionMLP Qwen3_5GatedDeltaNet "
    "apply_rotary_pos_emb apply_rotary_pos_emb_vision",
    "qwen3_5_moe": "Qwen3_5MoeRMSNorm Qwen3_5MoeRMSNormGated LayerNorm Qwen3_5MoeMLP Qwen3_5MoeVisionMLP "
    "Qwen3_5MoeExperts Qwen3_5MoeSparseMoeBlock Qwen3_5MoeTopKRouter Qwen3_5MoeGatedDeltaNet apply_rotary_pos_emb "
    "apply_rotary_pos_emb_vision",
    "mistral3": "Mistral3RMSNorm PixtralRMSNorm PixtralMLP Ministral3RMSNorm Ministral3MLP apply_rotary_pos_emb",
    "gemma4_vision": "Gemma4RMSNorm Gemma4VisionMLP",
    "internvl": "InternVLVisionRMSNorm InternVLVisionMLP",
}

# Parameters that no gradient can reach, as regular expressions.
NO_GRADIENT = {
    "phi4": r"\.embed_tokens_extend\.",  # the image and audio parts: run as text
    "deepseek_v4": r"\.indexer\.",  # only chooses which compressed entries are attended to
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are too small for more, and equal bits shouldn't depend on how sums are split among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model):
    return model(**presets.inputs(model))


def output(outputs):
    logits = getattr(outputs, "logits", None)
    return outputs.last_hidden_state if logits is None else logits


def is_constant(tensor):
    return bool((tensor == tensor.flatten()[0]).all())


def test_import_is_lazy():
    code = "import sys, twinkle.presets; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name):
    model = presets.build(name)
    value = presets.loss(run(model))
    value.backward()

    assert value.shape == () and value.isfinite()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {n for n, _ in model.named_parameters() if re.search(NO_GRADIENT.get(name, "^$"), n)}
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NAMES)
def test_forward_reaches_what_kernels_replace(name, monkeypatch):
    model = presets.build(name)
    called = set()
    for module in model.modules():
        module.register_forward_hook(lambda module, args, result: called.add(type(module).__name__))
    homes, expected = {sys.modules[type(m).__module__] for m in model.modules()}, set(EXPECTED[name].split())

    def recorder(function_name, original):
        return lambda *args, **kwargs: called.add(function_name) or original(*args, **kwargs)

    for home, function_name in itertools.product(homes, expected):
        if function_name.startswith("apply_") and hasattr(home, function_name):
            monkeypatch.setattr(home, function_name, recorder(function_name, getattr(home, function_name)))
    run(model)
    assert expected - called == set()


def test_gemma4_runs_weightless_norms_and_shares_keys_and_values():
    model = presets.build("gemma4")
    called = []
    for module in model.modules():
        if type(module).__name__ == "Gemma4RMSNorm":
            module.register_forward_hook(lambda module, args, result: called.append(hasattr(module, "weight")))
    run(model)
    first, _, shared = model.model.layers
    assert set(called) == {True, False}
    assert not hasattr(shared.self_attn, "k_proj")
    assert shared.mlp.gate_proj.out_features == 2 * first.mlp.gate_proj.out_features


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits_and_no_global_state(name):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first, second, other = presets.build(name), presets.build(name), presets.build(name, seed=1)
    with torch.no_grad():
        results = [output(run(model)) for model in (first, second, other)]
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
def test_no_weight_is_trivial(name):
    state = presets.build(name).state_dict()
    assert [n for n, t in state.items() if t.is_floating_point() and t.numel() > 1 and is_constant(t)] == []


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_the_rounded_model(name):
    full, model = presets.build(name), presets.build(name, dtype=torch.bfloat16)
    rounded = full.state_dict()
    assert all(torch.equal(t, rounded[n].to(t.dtype)) for n, t in model.state_dict().items())
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype != torch.bfloat16}
    # Transformers' own doing, from 5.24 on.
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    assert all(any(re.search(rf"(^|\.){part}(\.|$)", name) for part in kept) for name in wide), wide
    assert all(b.dtype == torch.float32 for n, b in model.named_buffers() if n.endswith("inv_freq"))

    with torch.no_grad():
        value, outputs = presets.loss(run(full)), run(model)
    assert output(outputs).dtype == torch.bfloat16
    # The losses of text are means over 30 tokens near ln(256); bfloat16 has 8 bits, and a wrong expert or two may be
    # chosen.
    assert abs(presets.loss(outputs) - value) < 0.018 * value


@pytest.mark.parametrize("name", NAMES)
def test_meta(name):
    model = presets.build(name, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in presets.build(name).state_dict().items()
    }
    assert {t.device.type for t in presets.inputs(model, device="meta").values()} == {"meta"}


@pytest.mark.parametrize(
    "name, setting, value",
    [
        ("mistral", "sliding_window", None),
        ("llama4", "attention_chunk_size", 512),
        ("granite", "residual_multiplier", 1.0),
        ("deepseek_v4", "swiglu_limit", 1e3),
        ("qwen3_moe", "num_experts_per_tok", 1),
        ("internvl", "norm_type", "layer_norm"),
    ],
)
def test_peculiar_settings_matter(name, setting, value):
    with torch.no_grad():
        usual, changed = (output(run(presets.build(name, **o))) for o in ({}, {setting: value}))
    assert not torch.allclose(usual, changed, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_more_layers(name):
    config = presets.preset_config(name, num_hidden_layers=6).get_text_config()
    types = getattr(config, "layer_types", None)
    assert config.num_hidden_layers == 6 and (types is None or len(types) == 6)


def test_overrides_of_nested_settings():
    config = presets.preset_config(
        "qwen3_5", attn_implementation="eager", rms_norm_eps=1e-3, vision_config={"depth": 1}, image_token_id=249
    )
    assert config.text_config.rms_norm_eps == 1e-3
    assert (config.vision_config.depth, config.vision_config.hidden_size) == (1, 32)
    assert config.image_token_id == 249
    assert config.text_config._attn_implementation == config.vision_config._attn_implementation == "eager"
    assert presets.preset_config("qwen3_5").vision_config.depth == 2


@pytest.mark.parametrize("call", [presets.build, presets.preset_config])
def test_unknown_names_get_the_nearest(call):
    with pytest.raises(ValueError, match=r"unknown preset 'qwen3-moe'; nearest: 'qwen3_moe'; known: cohere2, .*llama"):
        call("qwen3-moe")
    with pytest.raises(ValueError, match=r"Qwen3Config has no setting 'hiden_size'; nearest: 'hidden_size'"):
        call("qwen3", hiden_size=32)


def test_text_inputs():
    config = presets.preset_config("llama")
    batch = presets.inputs(config, batch=3, length=5, seed=7)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, 5) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert torch.equal(batch["input_ids"], presets.inputs(config, batch=3, length=5, seed=7)["labels"])
    assert not torch.equal(batch["input_ids"], presets.inputs(config, batch=3, length=5, seed=8)["input_ids"])
    assert presets.inputs(presets.preset_config("llama", vocab_size=16))["input_ids"].max() < 16


def test_image_inputs():
    model = presets.build("qwen2_5_vl", dtype=torch.bfloat16)
    batch = presets.inputs(model, batch=3, length=6)
    is_image = batch["input_ids"] == model.config.image_token_id
    assert is_image.tolist() == [[False, True, True, True, True, False]] * 3
    assert torch.equal(is_image, batch["labels"] == -100) and torch.equal(is_image, batch["mm_token_type_ids"] == 1)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert presets.inputs(presets.preset_config("qwen2_5_vl"))["pixel_values"].dtype == torch.float32
    with pytest.raises(ValueError, match="length 5 is too short for 4 image tokens"):
        presets.inputs(model, length=5)
