"""Models that are spread over processes, their batches and gathered gradients; for the cases beside this file."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from twinkle import presets
from twinkle.moe import apply_expert_parallel, expert_mesh, fully_shard_model, parameter_groups
from twinkle.moe.parts import parts

ROWS = 8
"""Sequences of a batch, of all processes together."""


def device() -> torch.device:
    """This process's."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def new_model(lora: bool, few: bool = False) -> nn.Module:
    """Two mixture-of-experts layers; with adapters on the attention, the router and the experts."""
    model = presets.build("qwen3_moe", mlp_only_layers=[]).train()
    if few:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(_choose_the_first)
    if device().type == "cuda":  # where PyTorch has no grouped product in fp32
        model.set_experts_implementation("eager")
    return (with_adapters(model) if lora else model).to(device())


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, and then the first factors would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return adapted


def _choose_the_first(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, index = output
    return logits, weights, torch.arange(index.shape[1], device=index.device).expand_as(index)


def spread(model: nn.Module, ep: int, **options: Any) -> nn.Module:
    mesh = expert_mesh(ep, device_type=device().type)
    return fully_shard_model(apply_expert_parallel(model, mesh), mesh, **options)


def batch(step: int, order: int = 0) -> dict[str, torch.Tensor]:
    inputs = presets.inputs(presets.build("qwen3_moe", device="meta"), batch=ROWS, seed=step % 3, device="cpu")
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(order)) if order else torch.arange(ROWS)
    return {name: tensor[rows].to(device()) for name, tensor in inputs.items()}


def shares(inputs: dict[str, torch.Tensor], among: int) -> list[dict[str, torch.Tensor]]:
    """A batch in so many equal parts."""
    chunks = {name: tensor.chunk(among) for name, tensor in inputs.items()}
    return [{name: parts[place] for name, parts in chunks.items()} for place in range(among)]


def mine(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This process's part of a batch."""
    return shares(inputs, dist.get_world_size())[dist.get_rank()]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    adapted = any("lora_" in name for name, _ in model.named_parameters())
    return torch.optim.AdamW(parameter_groups(model), lr=2e-2 if adapted else 2e-3)


def gathered_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients of a spread model, under the names of a single process."""
    known, found = parts(model), {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = known[name].gather(gradient) if name in known else gradient.clone()
    return found
