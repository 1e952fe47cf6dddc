"""A dense model with FSDP2, trained by LoRA or, with --lora-rank 0, as a whole.

    torchrun --nproc-per-node 8 cookbook/transformers/fsdp2.py --model Qwen/Qwen3.5-4B
    torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py --model tiny:qwen3 --lr 3e-3

kernelize(model) is always called, unless TWINKLE_TORCH_BASELINE=1; --enable-liger adds the fused loss and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from settings import Place, Settings
from training import kernelized_model, mixed_precision, run

from twinkle.moe import expert_mesh, fully_shard_model, parameter_groups


def build(settings: Settings, place: Place) -> tuple[Any, torch.optim.Optimizer]:
    """The model, sharded over all processes, and its optimizer."""
    model = kernelized_model(settings, place)
    if settings.lora_rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules="all-linear")
        model = get_peft_model(model, lora)
    mesh = expert_mesh(1, device_type=place.device.type)
    fully_shard_model(model, mesh, mp_policy=mixed_precision(settings, place))
    return model, torch.optim.AdamW(parameter_groups(model), lr=settings.lr, weight_decay=0.0)


if __name__ == "__main__":
    run(Settings, build, model="Qwen/Qwen3.5-4B", output="out/fsdp2")
