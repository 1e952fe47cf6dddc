"""What whole models are measured on: shapes of published ones, with random weights and random tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

DTYPE = torch.bfloat16

QWEN3_0_6B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
"""Of the published configurations, what decides about the number and the kind of modules."""

_IN_A_STEP = {"max_position_embeddings": 4096, "attn_implementation": "sdpa"}


@dataclass(frozen=True)
class Workload:
    """A model of transformers with random weights, and a batch of random tokens.

    Attributes:
        name: for the report.
        family: ``Qwen3`` for ``Qwen3Config`` and ``Qwen3ForCausalLM``.
        batch, length: of the token ids.
        config: the configuration's arguments.
        mask: what says that there is none: nothing is padded. That is what transformers sees by itself, but not under a
            compiler: there it would build a mask, and attention with one takes three times as long. A model that takes
            no mapping is left to see by itself.
    """

    name: str
    family: str
    batch: int
    length: int
    config: dict[str, Any]
    mask: dict[str, None] | None = None

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.length}"


QWEN3_SMALL = Workload(
    "qwen3-0.6b", "Qwen3", batch=4, length=2048, config={**QWEN3_0_6B, **_IN_A_STEP}, mask={"full_attention": None}
)

QWEN3_MOE = Workload(
    "qwen3-30b-a3b-6-layers",
    "Qwen3Moe",
    batch=2,
    length=4096,
    config={**QWEN3_30B_A3B, **_IN_A_STEP, "num_hidden_layers": 6},
)

_TOY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def toy(workload: Workload) -> Workload:
    """The same model in a size that tells nothing."""
    narrow = {"moe_intermediate_size": 32, "num_experts": 16} if "num_experts" in workload.config else {}
    config = {**workload.config, **_TOY, "intermediate_size": 128, **narrow}
    return dataclasses.replace(workload, name="toy", batch=2, length=32, config=config)


def new_model(workload: Workload, device: torch.device) -> Any:
    """The model in training mode, without a cache, the same at every call on a device."""
    import transformers

    config = getattr(transformers, f"{workload.family}Config")(**workload.config)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{workload.family}ForCausalLM")(config)
    model = model.to(DTYPE).train()
    model.config.use_cache = False
    return model
