"""The options of the scripts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

BASELINE = "TWINKLE_TORCH_BASELINE"
"""Set to 1, true or yes: nothing of ours computes, neither kernels nor the fused loss."""


def baseline() -> bool:
    """Whether :data:`BASELINE` is set."""
    return os.environ.get(BASELINE, "").lower() in ("1", "true", "yes")


def option(default: Any, text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Settings:
    """The options of every script."""

    model: str = option("tiny:qwen3", "tiny:<preset>, shape:<published model>, or a transformers id or folder")
    layers: int | None = option(None, "keep only the first layers of the model")
    text: str | None = option(None, "file to train on; this project's documentation when not given")
    length: int = option(512, "tokens of a sequence")
    batch: int = option(8, "sequences of a step, of all processes together")
    accumulate: int = option(1, "parts that a step's sequences are taken in, one after the other")
    steps: int = option(100, "optimizer steps")
    lr: float = option(1e-4, "learning rate, after the warm-up and before the cosine")
    warmup: int = option(5, "steps until the learning rate is reached")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm")
    lora_rank: int = option(8, "of the adapters; 0 trains all weights")
    lora_alpha: int = option(32, "of the adapters")
    gradient_checkpointing: bool = option(
        False, "compute layers again in the backward instead of keeping their results"
    )
    enable_liger: bool = option(False, "use the fused linear cross-entropy; nothing else depends on it")
    fused_ce: Literal["twinkle", "liger"] = option("twinkle", "whose fused linear cross-entropy")
    output: str = option("out", "folder of the log and the checkpoints")
    save_every: int = option(0, "steps between checkpoints; 0 for one at the end only, -1 for none")
    resume: str | None = option(None, "checkpoint to go on from, made by any number of processes")
    seed: int = option(0, "of random weights and of the order of the text")
    timeout: int = option(600, "seconds after which a process that waits for another gives up")


@dataclass
class ExpertSettings(Settings):
    """Of mixtures of experts, besides."""

    ep_size: int = option(0, "processes that share the experts; 0 for all, 1 for none")
    experts: str = option("", "backends of the experts, best first, e.g. triton,liger; the default mapping's otherwise")


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    rank: int
    world: int
    device: torch.device


class WrongSettings(Exception):
    """What the user can mend: one message that names the setting and the remedy."""
