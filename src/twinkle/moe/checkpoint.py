"""State dicts in the format of a single process, whoever owns the experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from twinkle.moe.expert_parallel import Shard


def _shards(model: nn.Module) -> dict[str, Shard]:
    """Name of a parameter that is a part -> its module's shard."""
    found: dict[str, Shard] = {}
    for prefix, module in model.named_modules():
        shard: Shard | None = getattr(module, "_twinkle_experts", None)
        for name in shard.names if shard else ():
            found[f"{prefix}.{name}" if prefix else name] = shard  # type: ignore[assignment]
    return found


def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the whole model, on every process: all have to call it."""
    shards = _shards(model)
    gathered = {}
    for name, tensor in model.state_dict().items():
        shard = shards.get(name)
        if shard is not None:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(shard.group))]
            dist.all_gather(parts, tensor.contiguous(), group=shard.group)
            tensor = torch.cat(parts)
        gathered[name] = tensor
    return gathered


def load_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Loads a whole model's state dict, of which each process takes its part.

    Raises:
        RuntimeError: as ``nn.Module.load_state_dict``.
    """
    shards = _shards(model)
    parts = {}
    for name, tensor in state.items():
        shard = shards.get(name)
        if shard is not None:
            tensor = tensor.chunk(dist.get_world_size(shard.group))[dist.get_rank(shard.group)]
        parts[name] = tensor
    model.load_state_dict(parts, strict=strict)
