"""A mixture of experts of the Qwen3 family: expert parallelism, FSDP2 and LoRA on attention and experts.

    torchrun --nproc-per-node 8 cookbook/transformers/ep_fsdp2_lora_qwen3_moe.py --ep-size 4
    torchrun --nproc-per-node 2 cookbook/transformers/ep_fsdp2_lora_qwen3_moe.py --model tiny:qwen3_moe --lr 1e-2

Of --ep-size processes each keeps a part of every layer's experts, and the tokens travel; the processes with the same
part shard it among them, and all processes shard everything else. kernelize(model) is always called, unless
TWINKLE_TORCH_BASELINE=1, and what it installs computes the experts here as in a single process; --enable-liger adds the
fused loss and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from settings import ExpertSettings, Place
from training import kernelized_model, mixed_precision, run

from twinkle.moe import apply_expert_parallel, expert_mesh, fully_shard_model, parameter_groups


def build(settings: ExpertSettings, place: Place) -> tuple[Any, torch.optim.Optimizer]:
    """The model, spread over all processes, and its optimizer."""
    mesh = expert_mesh(settings.ep_size or place.world, device_type=place.device.type)
    model = kernelized_model(settings, place)
    if settings.lora_rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules="all-linear",
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = get_peft_model(model, lora)
    apply_expert_parallel(model, mesh)
    fully_shard_model(model, mesh, mp_policy=mixed_precision(settings, place))
    return model, torch.optim.AdamW(parameter_groups(model), lr=settings.lr, weight_decay=0.0)


if __name__ == "__main__":
    run(ExpertSettings, build, model="Qwen/Qwen3-30B-A3B", output="out/ep_fsdp2_lora_qwen3_moe")
