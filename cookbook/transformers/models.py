"""What the scripts train, and on what: ``--model`` and ``--text``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from settings import WrongSettings

from twinkle import presets
from twinkle.commands.demo.text import documents
from twinkle.commands.models import cut_layers
from twinkle.reasons import did_you_mean

TINY, SHAPE = "tiny:", "shape:"

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_0_6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_30b_a3b": (
        "Qwen3MoeConfig",
        {
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
        },
    ),
    "qwen3_5_35b_a3b": ("Qwen3_5MoeTextConfig", {}),  # the sizes that transformers has as defaults
}
"""Sizes of published models; the weights are random, so nothing is downloaded."""


def new_model(name: str, *, layers: int | None, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model, in training mode; random weights are the same in every process.

    Args:
        name: ``tiny:<preset>``, ``shape:<published model>``, or an id or folder of transformers.
        layers: keep only the first ones; None for all.
        dtype: of the weights.
        device: random weights are made there; what is loaded stays on the CPU until it is sharded.

    Raises:
        WrongSettings: there is no such preset or shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name.startswith(TINY):
        preset = _known(name.removeprefix(TINY), presets.PRESETS, "preset", TINY)
        cut = {} if layers is None else {"num_hidden_layers": layers}
        model: Any = presets.build(preset, dtype=dtype, device=device, seed=seed, **cut)
    elif name.startswith(SHAPE):
        config = _config(_known(name.removeprefix(SHAPE), SHAPES, "shape", SHAPE))
        if layers is not None:
            cut_layers(config, layers)
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        config = AutoConfig.from_pretrained(name)
        if layers is not None:
            cut_layers(config, layers)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    model.config.get_text_config().use_cache = False
    return model.train()


def _config(shape: str) -> Any:
    import transformers

    family, sizes = SHAPES[shape]
    return getattr(transformers, family)(**sizes)


def _known(name: str, names: Any, kind: str, prefix: str) -> str:
    if name not in names:
        raise WrongSettings(
            f"--model: no {kind} {prefix}{name}{did_you_mean(name, names)}; there is: {', '.join(names)}"
        )
    return name


def tokens(model: str, text: str | None) -> torch.Tensor:
    """The text as token ids, int64 of one dimension.

    Args:
        model: its tokenizer is used; models with random weights take bytes for tokens.
        text: a file; None for this project's own documentation.

    Raises:
        WrongSettings: the file can't be read.
    """
    if text is None:
        content = "\n\n".join(document.text for document in documents())
    else:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise WrongSettings(f"--text {text}: {error.strerror}") from error
    if model.startswith((TINY, SHAPE)):
        return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8).long()
    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(model)(content)["input_ids"])


def batch(ids: torch.Tensor, step: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """Windows of the text at random places, ``[rows, length]``: the same for a step in every process and every run."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(ids) - length + 1, (rows,), generator=generator).tolist()
    return torch.stack([ids[start : start + length] for start in starts])
