"""What an optimizer needs to know about parameters that lie on different sets of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from twinkle.moe.parts import Part, find_experts, parts


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: the experts with their adapters, and everything else.

    Optimizers join the parameters of a group in one operation where they can, which those of different meshes don't
    allow. The groups are the same whether the experts are shared or not. Frozen parameters are in none.
    """
    owned = {id(p) for experts in find_experts(model) for p in experts.outermost.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if (id(p) in owned) is of_experts] for of_experts in (False, True)]
    return [{"params": group} for group in groups if group]


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, whatever the parameters are spread over. All processes have to call it.

    Args:
        model: its gradients are scaled in place when their norm is larger.
        max_norm: of all gradients together, the Euclidean one; infinite to only measure.

    Returns:
        the norm before, fp32, the same on every process.
    """
    known = parts(model)
    found = [(p.grad, known.get(name)) for name, p in model.named_parameters() if p.grad is not None]
    if not found:  # the same in every process: all have the same parameters
        return torch.zeros(())
    with torch.no_grad():
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad, _ in found]
        squares = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32)).square()
        # Every piece is on as many processes as it takes to make the world, and counts once.
        share = [_pieces(grad, part) / dist.get_world_size() for grad, part in found]
        total = squares @ torch.tensor(share, device=squares.device)
        dist.all_reduce(total)
        norm = total.sqrt()
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _pieces(gradient: torch.Tensor, part: Part | None) -> int:
    """Into how many different pieces the whole gradient is cut."""
    pieces = 1 if part is None else dist.get_world_size(part.group)
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            pieces *= size if isinstance(placement, Shard) else 1
    return pieces
