"""Expert parallelism: each process keeps some of the experts, and the tokens travel.

The experts' module itself is used as it is, with fewer experts: hooks around it send the tokens to their experts'
owners and the results back. So whatever computes the experts, transformers' own code or a kernel that ``kernelize``
installed, before or after, does it here as well, and router, shared experts and auxiliary losses are the model's own.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from twinkle.moe.dispatch import Dispatch, combine, dispatch

STACKS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
"""Parameters of an experts module whose first dimension is the experts."""


class Shard(NamedTuple):
    """What an experts module knows about its part, under ``module._twinkle_experts``.

    Attributes:
        experts: of all processes together.
        group: the processes.
        names: the parameters that are parts.
    """

    experts: int
    group: dist.ProcessGroup
    names: tuple[str, ...]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, *, dim: str = "ep") -> nn.Module:
    """Leaves each process its part of the experts of every mixture-of-experts layer.

    To be called on the whole model in every process, before ``fully_shard`` and before an optimizer is made.

    Args:
        model: changed in place; transformers' experts modules with stacked weights are found in it.
        mesh: has a dimension ``dim`` of the processes that share the experts; with one process nothing changes.
        dim: its name.

    Returns:
        the same model.

    Raises:
        ValueError: the mesh has no such dimension, the model no such experts, their number isn't a multiple of the
            processes', or they are parts already; nothing was changed.
    """
    if dim not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"the mesh has no dimension {dim!r}; its dimensions: {mesh.mesh_dim_names or 'unnamed'}")
    group = mesh.get_group(dim)
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        wanted = "modules with stacked weights gate_up_proj and down_proj"
        raise ValueError(f"{type(model).__name__} has no experts to share: no {wanted}")
    for name, module in found.items():
        if hasattr(module, "_twinkle_experts"):
            raise ValueError(f"{name}: the experts are shared among processes already")
        if number_of_experts(module) % processes:
            raise ValueError(f"{name}: {number_of_experts(module)} experts can't be shared among {processes} processes")
    if processes > 1:
        for module in found.values():
            _share(module, group, processes, rank)
    return model


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of several experts in stacks of its own."""
    parameters = module._parameters
    stacks = (parameters.get(name) for name in STACKS[:2])
    return hasattr(module, "num_experts") and all(stack is not None and stack.dim() == 3 for stack in stacks)


def number_of_experts(module: nn.Module) -> int:
    """Of an experts module, as its weights have it."""
    return int(module._parameters["gate_up_proj"].shape[0])  # type: ignore[union-attr]


def _share(module: Any, group: dist.ProcessGroup, processes: int, rank: int) -> None:
    experts = number_of_experts(module)
    own = experts // processes
    names = tuple(name for name in STACKS if module._parameters.get(name) is not None)
    for name in names:
        whole = module._parameters[name]
        part = whole.detach()[rank * own : (rank + 1) * own].clone()
        module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
    module.num_experts = own
    module._twinkle_experts = Shard(experts, group, names)
    module._twinkle_under_way = None
    module.register_forward_pre_hook(_send, with_kwargs=True)
    module.register_forward_hook(_fetch)


def _send(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the experts: other processes' tokens in the place of this one's, each for one expert."""
    # Named arguments may come in any order.
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    _, x, index, weights = bound.args
    shard: Shard = module._twinkle_experts
    under_way, local = dispatch(x, index, weights, shard.experts, shard.group)
    module._twinkle_under_way = under_way
    return (under_way.arrived, local[:, None], weights.new_ones(len(local), 1)), {}


def _fetch(module: Any, args: tuple[Any, ...], results: torch.Tensor) -> torch.Tensor:
    """After the experts: the results for this process's tokens."""
    under_way: Dispatch = module._twinkle_under_way
    module._twinkle_under_way = None
    if not len(under_way.arrived):
        # Nothing came in. What is sent back must hang on what came and on the weights all the same: the backward is a
        # collective, which every process has to reach, and so is FSDP's reduction of the weights' gradients.
        nothing = sum(parameter.flatten()[:1].sum() * 0 for parameter in module.parameters(recurse=False))
        results = under_way.arrived + nothing
    return combine(results, under_way, module._twinkle_experts.group)
