"""Expert parallelism: each process keeps some of the experts, and the tokens travel.

The experts' module itself is used as it is, with fewer experts: hooks around it send the tokens to their experts'
owners and the results back. So whatever computes the experts, transformers' own code or a kernel that ``kernelize``
installed, before or after, does it here as well, and router, shared experts and auxiliary losses are the model's own.
LoRA on the experts' stacks, by PEFT's wrappers around the module, is shared like the stacks.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from twinkle.kernel.ops.moe.experts_reference import WEIGHTS
from twinkle.moe.dispatch import Dispatch, combine, dispatch
from twinkle.moe.parts import STACKS, Experts, Part, factors, find_experts, mark, part_of


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, *, dim: str = "ep") -> nn.Module:
    """Leaves each process its part of the experts of every mixture-of-experts layer.

    To be called on the whole model in every process, before ``fully_shard`` and before an optimizer is made. LoRA
    adapters of the experts may be there already, or be added afterwards; in the latter case each process draws its
    own experts' at random.

    An expert's gradient is that of the sum of the processes' losses, not of their mean as with data parallelism:
    :func:`~twinkle.moe.fully_shard_model` divides it.

    Args:
        model: changed in place; transformers' experts modules with stacked weights are found in it.
        mesh: has a dimension ``dim`` of the processes that share the experts; with one process nothing changes.
        dim: its name.

    Returns:
        the same model.

    Raises:
        ValueError: the mesh has no such dimension, the model no such experts, their number isn't a multiple of the
            processes', they are parts or sharded already, or have adapters that can't be parted; nothing was changed.
    """
    if dim not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"the mesh has no dimension {dim!r}; its dimensions: {mesh.mesh_dim_names or 'unnamed'}")
    group = mesh.get_group(dim)
    found = find_experts(model)
    if not found:
        wanted = "modules with stacked weights gate_up_proj and down_proj"
        raise ValueError(f"{type(model).__name__} has no experts to share: no {wanted}")
    for experts in found:
        _check(experts, dist.get_world_size(group))
    if dist.get_world_size(group) > 1:
        for experts in found:
            _share(experts, group)
    return model


def number_of_experts(module: nn.Module) -> int:
    """Of an experts module, as its weights have it."""
    return int(module._parameters["gate_up_proj"].shape[0])  # type: ignore[union-attr]


def _check(experts: Experts, processes: int) -> None:
    name, module, wrappers = experts
    number = number_of_experts(module)
    if part_of(module) is not None:
        raise ValueError(f"{name}: the experts are shared among processes already")
    if any(isinstance(parameter, DTensor) for parameter in experts.outermost.parameters()):
        raise ValueError(f"{name}: the experts are sharded already; call apply_expert_parallel before fully_shard")
    if number % processes:
        raise ValueError(f"{name}: {number} experts can't be shared among {processes} processes")
    for outer, wrapper in wrappers:
        if wrapper.num_experts != number:
            raise ValueError(
                f"{outer}: the adapter of {wrapper.parameter_name} isn't one for each expert, so it can't be shared; "
                f"adapt {' and '.join(WEIGHTS)} only"
            )


def _share(experts: Experts, group: dist.ProcessGroup) -> None:
    _, module, wrappers = experts
    number = number_of_experts(module)
    part = Part(number, group)
    for name in STACKS:
        if module._parameters.get(name) is not None:
            module._parameters[name] = _cut(module._parameters[name], part)
    own = number // dist.get_world_size(group)
    for _, wrapper in wrappers:
        wrapper.num_experts = own
        for _, factor, second in factors(wrapper):
            factor.weight = _cut(factor.weight, part._replace(inner=second))
            factor.out_features, factor.in_features = factor.weight.shape
    module.num_experts = own
    mark(module, part)
    module._twinkle_under_way = None
    # How many rows come in differs by process and call. A compiler would trace that in pieces, with the collectives
    # between them.
    eager: Any = torch.compiler.disable
    module.register_forward_pre_hook(eager(_send), with_kwargs=True)
    module.register_forward_hook(eager(_fetch))


def _cut(parameter: torch.Tensor, part: Part) -> nn.Parameter:
    # A copy, so that the whole can be freed.
    return nn.Parameter(part.cut(parameter.detach()).clone(), requires_grad=parameter.requires_grad)


def _send(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the experts: other processes' tokens in the place of this one's, once for each of their experts here."""
    # Named arguments may come in any order.
    bound = _signature(type(module).forward).bind(module, *args, **kwargs)
    _, x, index, weights = bound.args
    part = part_of(module)
    assert part is not None
    under_way, local = dispatch(x, index, weights, part.experts, part.group)
    module._twinkle_under_way = under_way
    return (under_way.rows, local[:, None], under_way.weights), {}


@functools.lru_cache(maxsize=64)
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def _fetch(module: Any, args: tuple[Any, ...], results: torch.Tensor) -> torch.Tensor:
    """After the experts: the results for this process's tokens."""
    under_way: Dispatch = module._twinkle_under_way
    module._twinkle_under_way = None
    if not len(under_way.rows):
        # Nothing came in. What is sent back must hang on what came and on the weights all the same: the backward is a
        # collective, which every process has to reach, and so is FSDP's reduction of the weights' gradients. Adapters
        # are behind the attributes while they are at work.
        stacks = (getattr(module, name, None) for name in STACKS)
        nothing = sum(stack.flatten()[:0].sum() for stack in stacks if stack is not None)
        results = under_way.rows * under_way.weights + nothing
    part = part_of(module)
    assert part is not None
    return combine(results, under_way, part.group)
