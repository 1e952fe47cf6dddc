"""The default mapping: which op replaces which class, method or function of transformers, by which backends.

Pure data. A new model family is one entry of ``_FAMILIES``. A target is listed when its op computes what the target
computes; whether an instance or a call is within a kernel's domain is still judged one by one, by the kernel.
"""

from __future__ import annotations

from twinkle.kernel.registry import KernelChoice, backends_of

# op -> backends, best first, as measured: see benchmarks/results and docs/en/benchmarks.md. Where the `torch`
# backend doesn't win (see ops/torch_support.py) it refuses. moe_experts by liger is never chosen, by torch it wasn't
# faster in every size.
_CHAINS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("npu", "triton", "liger", "torch"),
    "gated_rms_norm": ("npu", "triton", "torch"),
    "swiglu": ("npu", "triton", "liger"),
    "geglu": ("npu", "triton", "liger"),
    "rotary": ("npu", "triton", "liger", "torch"),
    "moe_router": ("triton",),
    "moe_experts": ("npu", "triton"),
    "moe_block": ("npu",),
    "sdpa_attention": ("npu",),
    "fla": ("fla", "npu"),  # torch_npu's rule has no gradient
}

# (op, prefix of the family's name) -> backends, instead of _CHAINS[op]. The qwen3_5 rotaries turn a quarter of the
# head; older Liger versions take the whole head for the rotated width.
_FAMILY_CHAINS: dict[tuple[str, str], tuple[str, ...]] = {
    ("rotary", "qwen3_5"): ("npu", "triton", "torch"),
}

# Keys without a dot: the op's own installer finds the places.
_LOGICAL: dict[str, str] = {"sdpa": "sdpa_attention", "fla": "fla"}

_ROPE = "apply_rotary_pos_emb"
# Half-split like _ROPE, but computed in fp32, on q and k of [sequence, heads, head_dim] with cos and sin of
# [sequence, head_dim].
_VISION_ROPE = "apply_rotary_pos_emb_vision"

# family -> op -> name (or names) in transformers.models.<family>.modeling_<family>.
#
# The op multimodal_rotary has no entry: no family of transformers 5.x has such a function. The position embedding
# recombines cos and sin over time, height and width, and a plain apply_rotary_pos_emb follows.
_FAMILIES: dict[str, dict[str, str | tuple[str, ...]]] = {
    # Qwen. The vision towers of qwen2_vl, qwen3_vl and qwen3_5 have LayerNorms and MLPs without a gate: no op fits.
    "qwen2": {"rms_norm": "Qwen2RMSNorm", "swiglu": "Qwen2MLP.forward", "rotary": _ROPE},
    "qwen2_vl": {"rms_norm": "Qwen2VLRMSNorm", "swiglu": "Qwen2MLP.forward", "rotary": (_ROPE, _VISION_ROPE)},
    "qwen2_5_vl": {
        "rms_norm": "Qwen2_5_VLRMSNorm",
        "swiglu": ("Qwen2MLP.forward", "Qwen2_5_VLMLP.forward"),  # text (a copy local to this file), vision
        "rotary": (_ROPE, _VISION_ROPE),
    },
    "qwen3": {"rms_norm": "Qwen3RMSNorm", "swiglu": "Qwen3MLP.forward", "rotary": _ROPE},
    "qwen3_vl": {"rms_norm": "Qwen3VLTextRMSNorm", "swiglu": "Qwen3VLTextMLP.forward", "rotary": (_ROPE, _VISION_ROPE)},
    "qwen3_moe": {
        "rms_norm": "Qwen3MoeRMSNorm",
        "swiglu": "Qwen3MoeMLP.forward",
        "rotary": _ROPE,
        "moe_router": "Qwen3MoeTopKRouter.forward",
        "moe_experts": "Qwen3MoeExperts.forward",
        "moe_block": "Qwen3MoeSparseMoeBlock.forward",
    },
    "qwen3_vl_moe": {
        "rms_norm": "Qwen3VLMoeTextRMSNorm",
        "swiglu": "Qwen3VLMoeTextMLP.forward",
        "rotary": (_ROPE, _VISION_ROPE),
        "moe_router": "Qwen3VLMoeTextTopKRouter.forward",
        "moe_experts": "Qwen3VLMoeTextExperts.forward",
        "moe_block": "Qwen3VLMoeTextSparseMoeBlock.forward",
    },
    "qwen3_next": {
        "rms_norm": "Qwen3NextRMSNorm",
        "gated_rms_norm": "Qwen3NextRMSNormGated.forward",
        "swiglu": "Qwen3NextMLP.forward",
        "rotary": _ROPE,
        "moe_router": "Qwen3NextTopKRouter.forward",
        "moe_experts": "Qwen3NextExperts.forward",
        "moe_block": "Qwen3NextSparseMoeBlock.forward",
    },
    "qwen3_5": {
        "rms_norm": "Qwen3_5RMSNorm",
        "gated_rms_norm": "Qwen3_5RMSNormGated.forward",
        "swiglu": "Qwen3_5MLP.forward",
        "rotary": (_ROPE, _VISION_ROPE),
    },
    "qwen3_5_moe": {
        "rms_norm": "Qwen3_5MoeRMSNorm",
        "gated_rms_norm": "Qwen3_5MoeRMSNormGated.forward",
        "swiglu": "Qwen3_5MoeMLP.forward",
        "rotary": (_ROPE, _VISION_ROPE),
        "moe_router": "Qwen3_5MoeTopKRouter.forward",
        "moe_experts": "Qwen3_5MoeExperts.forward",
        "moe_block": "Qwen3_5MoeSparseMoeBlock.forward",
    },
    # Llama and its relatives.
    "llama": {"rms_norm": "LlamaRMSNorm", "swiglu": "LlamaMLP.forward", "rotary": _ROPE},
    # llama4's rotary multiplies complex numbers, its experts take tokens already sorted and repeated: neither op fits.
    "llama4": {"rms_norm": ("Llama4TextRMSNorm", "Llama4TextL2Norm"), "swiglu": "Llama4TextMLP.forward"},
    "mistral": {"rms_norm": "MistralRMSNorm", "swiglu": "MistralMLP.forward", "rotary": _ROPE},
    "mistral3": {"rms_norm": "Mistral3RMSNorm"},  # the projector's; text and vision are other families
    "ministral": {"rms_norm": "MinistralRMSNorm", "swiglu": "MinistralMLP.forward", "rotary": _ROPE},
    "ministral3": {"rms_norm": "Ministral3RMSNorm", "swiglu": "Ministral3MLP.forward", "rotary": _ROPE},
    # mixtral's block stays: its router may jitter the input while training.
    "mixtral": {
        "rms_norm": "MixtralRMSNorm",
        "rotary": _ROPE,
        "moe_router": "MixtralTopKRouter.forward",
        "moe_experts": "MixtralExperts.forward",
    },
    "pixtral": {"rms_norm": "PixtralRMSNorm", "geglu": "PixtralMLP.forward", "rotary": _ROPE},
    "smollm3": {"rms_norm": "SmolLM3RMSNorm", "swiglu": "SmolLM3MLP.forward", "rotary": _ROPE},
    "granite": {"rms_norm": "GraniteRMSNorm", "swiglu": "GraniteMLP.forward", "rotary": _ROPE},
    "olmo2": {"rms_norm": "Olmo2RMSNorm", "swiglu": "Olmo2MLP.forward", "rotary": _ROPE},
    "olmo3": {"rms_norm": "Olmo3RMSNorm", "swiglu": "Olmo3MLP.forward", "rotary": _ROPE},
    "exaone4": {"rms_norm": "Exaone4RMSNorm", "swiglu": "Exaone4MLP.forward", "rotary": _ROPE},
    "ernie4_5": {"rms_norm": "Ernie4_5RMSNorm", "swiglu": "Ernie4_5MLP.forward", "rotary": _ROPE},
    "cohere2": {"swiglu": "Cohere2MLP.forward", "rotary": _ROPE},  # its norm is a LayerNorm
    "starcoder2": {"rotary": _ROPE},  # LayerNorms, and an MLP without a gate
    "internvl": {"rms_norm": "InternVLVisionRMSNorm"},  # vision MLP without a gate; the text is another family
    # Phi and GLM: MLPs with one fused gate_up_proj.
    "phi3": {"rms_norm": "Phi3RMSNorm", "swiglu": "Phi3MLP.forward", "rotary": _ROPE},
    "phi4_multimodal": {"rms_norm": "Phi4MultimodalRMSNorm", "swiglu": "Phi4MultimodalMLP.forward", "rotary": _ROPE},
    "glm": {"rms_norm": "GlmRMSNorm", "swiglu": "GlmMLP.forward", "rotary": _ROPE},
    "glm4": {"rms_norm": "Glm4RMSNorm", "swiglu": "Glm4MLP.forward", "rotary": _ROPE},
    "glm4_moe": {
        "rms_norm": "Glm4MoeRMSNorm",
        "swiglu": "Glm4MoeMLP.forward",  # gate and up are separate here
        "rotary": _ROPE,
        "moe_experts": "Glm4MoeExperts.forward",
    },
    # Gemma.
    "gemma": {"rms_norm": "GemmaRMSNorm", "geglu": "GemmaMLP.forward", "rotary": _ROPE},
    "gemma2": {"rms_norm": "Gemma2RMSNorm", "geglu": "Gemma2MLP.forward", "rotary": _ROPE},
    "gemma3": {"rms_norm": "Gemma3RMSNorm", "geglu": "Gemma3MLP.forward", "rotary": _ROPE},
    # Some of gemma3n's MLPs drop small gate values before the activation: not a plain GELU MLP.
    "gemma3n": {"rms_norm": "Gemma3nRMSNorm", "rotary": _ROPE},
    "gemma4": {
        "rms_norm": "Gemma4RMSNorm",
        "geglu": ("Gemma4TextMLP.forward", "Gemma4VisionMLP.forward"),
        "rotary": _ROPE,
        "moe_experts": "Gemma4TextExperts.forward",
    },
    # DeepSeek and gpt-oss. The MLPs and experts of deepseek_v4 and gpt_oss clamp the gate: they stay as they are.
    "deepseek_v3": {
        "rms_norm": "DeepseekV3RMSNorm",
        "swiglu": "DeepseekV3MLP.forward",
        "rotary": (_ROPE, "apply_rotary_pos_emb_interleave"),  # the second reads pairs and writes halves
        "moe_experts": "DeepseekV3Experts.forward",
    },
    "deepseek_v4": {"rms_norm": ("DeepseekV4RMSNorm", "DeepseekV4UnweightedRMSNorm"), "rotary": _ROPE},
    "gpt_oss": {"rms_norm": "GptOssRMSNorm", "rotary": _ROPE},
}


def _chain(op: str, family: str) -> tuple[str, ...]:
    for (family_op, prefix), backends in _FAMILY_CHAINS.items():
        if op == family_op and family.startswith(prefix):
            return backends
    return _CHAINS[op]


def _build() -> dict[str, KernelChoice]:
    mapping: dict[str, KernelChoice] = {}
    for family, targets in _FAMILIES.items():
        module = f"transformers.models.{family}.modeling_{family}"
        for op, names in targets.items():
            for name in (names,) if isinstance(names, str) else names:
                mapping[f"{module}.{name}"] = KernelChoice(op, _chain(op, family))
    for key, op in _LOGICAL.items():
        mapping[key] = KernelChoice(op, _CHAINS[op])
    return mapping


# Entries that the default mapping leaves to the user: they change what a model returns, or take its code apart.
_OPT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "fused_ce": ("causal_lm_loss", ("triton", "torch")),
    "fused_qk": ("qk_norm_rotary", ("triton",)),
    "fused_add_norm": ("add_rms_norm", ("triton",)),
}


def default_chain(op: str) -> tuple[str, ...]:
    """The backends that the default config tries for an op, best first; for an op that it doesn't know, all it has."""
    return _CHAINS.get(op) or backends_of(op)


DEFAULT_KERNEL_CONFIG: dict[str, KernelChoice] = _build()
"""The mapping that ``kernelize`` takes when none is given."""

OPT_IN_KERNEL_CONFIG: dict[str, KernelChoice] = {key: KernelChoice(*choice) for key, choice in _OPT_IN.items()}
"""Further entries: ``{**DEFAULT_KERNEL_CONFIG, **OPT_IN_KERNEL_CONFIG}`` is all that there is for training."""
