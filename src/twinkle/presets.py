"""Tiny, randomly initialised transformers models, one per model family.

They have real architectures and toy sizes (20 to 330 thousand parameters, milliseconds per step on a CPU) and need no
download and no tokenizer: token ids are bytes. `PRESETS` is data; `build`, `inputs` and `loss` turn an entry into a
model, a batch for it and a scalar to differentiate. Importing this module imports neither torch nor transformers.

    model = build("qwen3")
    batch = inputs(model)
    loss(model(**batch)).backward()
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle import preset_inputs as kinds
from twinkle.reasons import nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["PRESETS", "Preset", "build", "inputs", "loss", "make_nontrivial", "preset_config"]


# --- presets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """One family: the names of its transformers classes, the configuration's arguments and the kind of input."""

    config: str
    model: str
    settings: Mapping[str, Any]
    recipe: Callable[..., dict[str, torch.Tensor]] = kinds.text


def _causal(family: str, *parts: Mapping[str, Any], config: str = "", **settings: Any) -> Preset:
    return Preset(config or f"{family}Config", f"{family}ForCausalLM", _with(BASE, *parts, settings))


def _vision_language(family: str, vision: Mapping[str, Any], *parts: Mapping[str, Any]) -> Preset:
    parts_of_both = {"text_config": _with(BASE, *parts), "vision_config": vision, "tie_word_embeddings": False}
    settings = parts_of_both | kinds.IMAGE_IDS
    return Preset(f"{family}Config", f"{family}ForConditionalGeneration", settings, kinds.text_and_patches)


def _with(*parts: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Join settings; later ones win."""
    return {key: value for part in (*parts, settings) for key, value in part.items()}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | parameters}


# Several times the usual 0.02: at width 64 the usual value leaves the output of every MLP and attention far below the
# residual stream, where an error in it would hardly show in the logits.
RANGE = {"initializer_range": 0.1}
SIZES = _with(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=512)
HEADS = _with(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
BASE = _with(RANGE, SIZES, HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2)

# Three layers: one that shares keys and values needs an earlier one of its own type that doesn't.
SHARED_KEYS = _with(
    _with(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    _with(sliding_window=8, num_kv_shared_layers=1),
)
PER_LAYER_INPUT = _with(vocab_size_per_layer_input=256, hidden_size_per_layer_input=8)
SLIDING = _with(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
LINEAR = _with(
    _with(layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4, head_dim=32),
    _with(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16),
)
TOP_2 = _with(num_experts_per_tok=2, moe_intermediate_size=32)
EXPERTS = _with(TOP_2, num_experts=8, norm_topk_prob=True)
FIRST_DENSE = {"mlp_only_layers": [0]}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
LOCAL_EXPERTS = _with(num_local_experts=8, num_experts_per_tok=2, intermediate_size=32)
GROUPED_EXPERTS = _with(TOP_2, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1)

HALF_ROPE = _rope(partial_rotary_factor=0.5)
YARN = _rope(rope_type="yarn", factor=32.0, original_max_position_embeddings=16, truncate=False)
YARN_SCALED = _rope(**YARN["rope_parameters"], llama_4_scaling_beta=0.1)
MROPE = _rope(mrope_section=[2, 3, 3])
MROPE_INTERLEAVED = _rope(mrope_section=[4, 2, 2], mrope_interleaved=True)
MROPE_PARTIAL = _rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)

VISION = _with(
    RANGE,
    _with(depth=2, hidden_size=32, intermediate_size=64, out_hidden_size=64, num_heads=2),
    _with(patch_size=4, spatial_merge_size=2, temporal_patch_size=2),
)
POSITIONS = {"num_position_embeddings": 16}
DEEPSTACK = {"deepstack_visual_indexes": [0]}
SMALL = _with(hidden_size=32, intermediate_size=64, num_attention_heads=2)

# Mixture-of-experts families that know dense layers have one; hybrid families have one layer of linear attention.
PRESETS: dict[str, Preset] = {
    "llama": _causal("Llama"),
    "mistral": _causal("Mistral", sliding_window=8),
    "ministral": _causal("Ministral", SLIDING),
    "ministral3": _causal("Ministral3", YARN_SCALED),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=32),
    "smollm3": _causal("SmolLM3", no_rope_layers=[1, 0]),
    "ernie4_5": _causal("Ernie4_5"),
    "olmo2": _causal("Olmo2"),
    "olmo3": _causal("Olmo3", SLIDING),
    "exaone4": _causal("Exaone4", SLIDING),
    "granite": _causal(
        "Granite",
        _with(embedding_multiplier=12.0, residual_multiplier=0.22),
        _with(attention_multiplier=0.125, logits_scaling=8.0),
    ),
    "phi3": _causal("Phi3"),
    "glm": _causal("Glm", HALF_ROPE),
    "glm4": _causal("Glm4", HALF_ROPE),
    # Text only: the image and audio parts exist, but get no input.
    "phi4": _causal(
        "Phi4Multimodal",
        _rope(partial_rotary_factor=0.75),
        vision_config=_with(SMALL, num_hidden_layers=2, image_size=16, crop_size=16, patch_size=4, image_token_id=250),
        audio_config=_with(
            SMALL,
            _with(num_blocks=2, nemo_conv_channels=8, ext_pw_out_channel=32, depthwise_separable_out_channel=32),
            audio_token_id=251,
        ),
    ),
    "cohere2": _causal("Cohere2", SLIDING),
    "starcoder2": _causal("Starcoder2"),
    "gemma": _causal("Gemma"),
    "gemma2": _causal("Gemma2", SLIDING, query_pre_attn_scalar=16),
    "gemma3": _causal("Gemma3", SLIDING, config="Gemma3TextConfig", query_pre_attn_scalar=16),
    "gemma3n": _causal(
        "Gemma3n",
        _with(SHARED_KEYS, PER_LAYER_INPUT, altup_num_inputs=2, laurel_rank=8),
        config="Gemma3nTextConfig",
    ),
    "gemma4": _causal(
        "Gemma4",
        _with(SHARED_KEYS, PER_LAYER_INPUT, global_head_dim=32, use_double_wide_mlp=True),
        _with(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32),
        config="Gemma4TextConfig",
    ),
    "mixtral": _causal("Mixtral", LOCAL_EXPERTS),
    "gpt_oss": _causal("GptOss", LOCAL_EXPERTS, SLIDING, YARN),
    "qwen3_moe": _causal("Qwen3Moe", EXPERTS, FIRST_DENSE),
    "qwen3_next": _causal("Qwen3Next", LINEAR, EXPERTS, FIRST_DENSE, SHARED_EXPERT),
    "glm4_moe": _causal("Glm4Moe", GROUPED_EXPERTS, HALF_ROPE, use_qk_norm=True),
    "llama4": _causal(
        "Llama4",
        _with(num_local_experts=8, num_experts_per_tok=1, intermediate_size=32),
        _with(interleave_moe_layer_step=2, intermediate_size_mlp=128, no_rope_layers=[1, 0], attention_chunk_size=8),
        config="Llama4TextConfig",
    ),
    "deepseek_v3": _causal(
        "DeepseekV3",
        GROUPED_EXPERTS,
        _with(num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32),
        _with(qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16),
    ),
    # swiglu_limit is low enough for the clamps to act.
    "deepseek_v4": _causal(
        "DeepseekV4",
        _with(layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], sliding_window=8),
        _with(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}),
        _with(mlp_layer_types=["hash_moe", "moe"], n_routed_experts=8, num_experts_per_tok=2, intermediate_size=32),
        _with(num_key_value_heads=1, q_lora_rank=32, o_groups=2, o_lora_rank=16, partial_rotary_factor=0.5),
        _with(index_n_heads=2, index_head_dim=16, index_topk=2, hc_mult=2, swiglu_limit=1.0),
    ),
    "qwen2_vl": _vision_language("Qwen2VL", _with(VISION, embed_dim=32, hidden_size=64, mlp_ratio=2), MROPE),
    "qwen2_5_vl": _vision_language("Qwen2_5_VL", _with(VISION, window_size=8, fullatt_block_indexes=[1]), MROPE),
    "qwen3_vl": _vision_language("Qwen3VL", _with(VISION, POSITIONS, DEEPSTACK), MROPE_INTERLEAVED),
    "qwen3_vl_moe": _vision_language(
        "Qwen3VLMoe", _with(VISION, POSITIONS, DEEPSTACK), MROPE_INTERLEAVED, EXPERTS, FIRST_DENSE
    ),
    "qwen3_5": _vision_language("Qwen3_5", _with(VISION, POSITIONS), LINEAR, MROPE_PARTIAL),
    "qwen3_5_moe": _vision_language(
        "Qwen3_5Moe", _with(VISION, POSITIONS), LINEAR, MROPE_PARTIAL, EXPERTS, SHARED_EXPERT
    ),
    # Its own is the projector between the vision tower of pixtral and the text of ministral3.
    "mistral3": Preset(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        _with(
            text_config=_with(BASE, YARN_SCALED, model_type="ministral3"),
            vision_config=_with(SMALL, RANGE, model_type="pixtral", num_hidden_layers=2, image_size=16, patch_size=4),
            image_token_index=kinds.IMAGE_IDS["image_token_id"],
            tie_word_embeddings=False,
        ),
        kinds.text_and_pixels,
    ),
    # Vision only.
    "gemma4_vision": Preset(
        "Gemma4VisionConfig",
        "Gemma4VisionModel",
        _with(SMALL, RANGE, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, patch_size=4)
        | _with(pooling_kernel_size=2, position_embedding_size=16, use_clipped_linears=True),
        kinds.patches,
    ),
    # Vision only: InternVL's language part is another family.
    "internvl": Preset(
        "InternVLVisionConfig",
        "InternVLVisionModel",
        _with(SMALL, RANGE, num_hidden_layers=2, norm_type="rms_norm", use_qk_norm=True, image_size=16, patch_size=4),
        kinds.pixels,
    ),
}

_RECIPES = {preset.config: preset.recipe for preset in PRESETS.values()}
_PER_LAYER = {"layer_types", "mlp_layer_types", "no_rope_layers"}


# --- public functions -----------------------------------------------------------------------------------------------


def preset_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Return a new transformers configuration for the preset `name`.

    `overrides` replace settings of the configuration; where it is nested, those that only its text part knows go there,
    and a dict for `text_config` or `vision_config` is merged into that part. With `num_hidden_layers` alone, settings
    that have one value per layer repeat their pattern.

    Raises:
        ValueError: `name` is not in `PRESETS`, or the configuration has no setting of an override's name.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {_nearest(name, PRESETS)}")
    import transformers

    preset = PRESETS[name]
    config_class = getattr(transformers, preset.config)
    settings = copy.deepcopy(dict(preset.settings))
    defaults = config_class(**copy.deepcopy(settings))
    text, text_defaults = settings.get("text_config", settings), defaults.get_text_config()
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in ("text_config", "vision_config") and key in settings:
            settings[key].update(value)
        elif _has_setting(defaults, key):
            settings[key] = value
        elif _has_setting(text_defaults, key):
            text[key] = value
        else:
            raise ValueError(f"{preset.config} has no setting {key!r}; {_nearest(key, text_defaults.to_dict())}")
    if "num_hidden_layers" in overrides:
        for key in _PER_LAYER & (text.keys() - overrides.keys()):
            text[key] = list(itertools.islice(itertools.cycle(text[key]), overrides["num_hidden_layers"]))
    return config_class(**settings)


def build(
    name: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Build the preset `name` with random weights, in evaluation mode.

    The weights depend on `seed` alone: they are drawn in float32 on the CPU, then rounded to `dtype` (default float32)
    and moved to `device`, so builds in two dtypes or on two devices can be compared. No global random state changes.
    On the meta device there are no values. `overrides` are those of `preset_config`, whose errors apply.
    """
    import torch
    import transformers

    config = preset_config(name, **overrides)
    make = getattr(transformers, PRESETS[name].model)._from_config
    dtype = dtype or torch.float32
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            return make(config, dtype=dtype).eval()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would seed the accelerators' generators too, which this fork doesn't save.
        torch.default_generator.manual_seed(seed)
        model = make(config, dtype=torch.float32)
        make_nontrivial(model)
        if dtype != torch.float32:
            # A model made in `dtype` keeps rotary frequencies in float32, where .to(dtype) would round them.
            weights, model = model.state_dict(), make(config, dtype=dtype)
            model.load_state_dict(weights)
    return model.to(device).eval()


def inputs(
    model_or_config: Any, *, batch: int = 2, length: int = 16, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Return keyword arguments for one forward call with `batch` rows, the same for a `seed` on every device.

    `model_or_config` is a transformers configuration or a module that has one as `config`.

    - Text: `input_ids` and `labels`, int64 [batch, length]; there is no padding, hence no mask.
    - Vision and language: also one image per row, as `pixel_values` [patches, values per patch], `image_grid_thw` int64
      [batch, 3] and `mm_token_type_ids` int64 [batch, length]; image positions hold the image token and no label.
    - Vision only: `pixel_values` [batch, channels, height, width].

    Floating-point inputs have the model's dtype (of a configuration: its `dtype`, else float32). A configuration of a
    class that no preset uses gets text.

    Raises:
        ValueError: `length` leaves no room for the image with text before and after it.
    """
    import torch

    config = getattr(model_or_config, "config", model_or_config)
    dtype = config.dtype or torch.float32
    if isinstance(model_or_config, torch.nn.Module):
        dtype = next(p.dtype for p in model_or_config.parameters() if p.is_floating_point())
    recipe: Callable[..., dict[str, torch.Tensor]] = _RECIPES.get(type(config).__name__, kinds.text)
    with torch.device("cpu"):
        tensors = recipe(config, batch, length, torch.Generator().manual_seed(seed))
    return {key: t.to(device, dtype) if t.is_floating_point() else t.to(device) for key, t in tensors.items()}


def loss(outputs: Any) -> torch.Tensor:
    """Return a scalar to differentiate: the model's own loss, else the mean square of `last_hidden_state` (float32)."""
    own: torch.Tensor | None = getattr(outputs, "loss", None)
    if own is not None:
        return own
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden.float().square().mean()


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    return f"nearest: {nearest(name, known, least=0.0)!r}; known: {', '.join(known)}"


def _has_setting(config: Any, key: str) -> bool:
    # Some settings, such as attn_implementation, are stored under a private name.
    return hasattr(config, key) or hasattr(config, f"_{key}")


def make_nontrivial(model: PreTrainedModel) -> None:
    """Add noise to norm weights, biases and every other tensor that was initialised to a constant.

    With weights of exactly one (or zero, where the norm adds one) and biases of zero, a kernel that drops the weight,
    the bias or the offset would still give the right numbers.
    """
    import torch

    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            # A table token -> experts that only checkpoints fill: give every token distinct experts.
            scores = torch.rand(tensor.shape[0], model.config.n_routed_experts)
            tensor.copy_(scores.argsort(dim=-1)[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and (tensor.ndim == 1 or bool((tensor == tensor.flatten()[0]).all())):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
