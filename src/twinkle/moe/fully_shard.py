"""FSDP2 of a model whose experts may be shared: the experts on the processes with the same part, the rest on all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from twinkle.moe.parts import Experts, find_experts, part_of


def expert_mesh(ep: int = 1, *, device_type: str) -> DeviceMesh:
    """All processes as a mesh ``(ep, fsdp)``: ``ep`` groups in a row, each with the same experts.

    Neighbours in ``fsdp`` are neighbouring ranks.

    Args:
        ep: how many processes share the experts; 1 for none.
        device_type: ``cuda``, ``npu``, ``cpu`` ...

    Raises:
        ValueError: the number of processes isn't a multiple of ``ep``.
    """
    world = dist.get_world_size()
    if ep < 1 or world % ep:
        fitting = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
        raise ValueError(f"{world} processes can't share experts {ep} by {ep}; expert parallelism may be {fitting}")
    return init_device_mesh(device_type, (ep, world // ep), mesh_dim_names=("ep", "fsdp"))


def fully_shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str = "fsdp",
    layers: Iterable[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> nn.Module:
    """PyTorch's ``fully_shard`` of each layer and of the model, and of the shared experts by themselves.

    Each process's loss is the mean over its part of a batch; gradients are those of the mean over all processes.

    Args:
        model: changed in place; in every process, after :func:`~twinkle.moe.apply_expert_parallel` if that is used.
            What isn't trained is frozen already: where one process has the whole of it, FSDP2 isn't told of it.
        mesh: of all the processes. Experts that are shared are sharded along ``dim``, everything else over all.
        dim: the name of that dimension.
        layers: what is gathered at once; by default the modules whose classes the model of transformers names in
            ``_no_split_modules``.
        mp_policy, options: of ``fully_shard``.

    Returns:
        the same model.

    Raises:
        ValueError: the mesh has no such dimension, no layers were found, or the mesh has a dimension ``ep`` of several
            processes, but the experts aren't shared; nothing was changed.
    """
    if dim not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"the mesh has no dimension {dim!r}; its dimensions: {mesh.mesh_dim_names or 'unnamed'}")
    found = find_experts(model)
    shared = [experts for experts in found if part_of(experts.module) is not None]
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if len(shared) < len(found) and sizes.get("ep", 1) > 1:
        raise ValueError(f"{found[0].name}: the experts aren't shared yet; call apply_expert_parallel first")
    layers = list(_layers(model) if layers is None else layers)
    if not layers:
        raise ValueError(f"{type(model).__name__} doesn't name its layers' classes (_no_split_modules); pass layers=")
    policy = mp_policy or MixedPrecisionPolicy()
    everyone = mesh if mesh.ndim == 1 else DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("all",))
    for experts in shared:
        _shard_experts(experts, mesh[dim], everyone.size(), policy, options)
    for module in (*layers, model):
        fully_shard(
            module, mesh=everyone, mp_policy=policy, ignored_params=_at_home(module, everyone, policy), **options
        )
    return model


def _at_home(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Parameters that FSDP2 would only copy at each use: whole and frozen here, in the dtype of the computation.

    They are brought to the device, which FSDP2 would do.
    """
    if mesh.size() > 1:
        return set()
    kind = mesh.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    found = {
        parameter
        for parameter in module.parameters()
        if not parameter.requires_grad
        and not isinstance(parameter, DTensor)
        and policy.param_dtype in (None, parameter.dtype)
    }
    for parameter in found:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    return found


def _layers(model: nn.Module) -> list[nn.Module]:
    # PEFT's model isn't a model of transformers, but has one.
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # A kernel's class derives from the layer's.
    return [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]


def _shard_experts(
    experts: Experts, mesh: DeviceMesh, processes: int, policy: MixedPrecisionPolicy, options: dict[str, Any]
) -> None:
    """Shards the outermost wrapper: an adapter takes the whole weights before it calls the experts."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        # Few experts don't go round; the second dimension is large, and has to come out even.
        rows, columns = parameter.shape[0] % mesh.size(), parameter.shape[1] % mesh.size()
        return Shard(1) if parameter.dim() == 3 and rows and not columns else None

    # Inputs come from within the layer and have the dtypes that it gives them, the router's weights their own.
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    whole = _at_home(experts.outermost, mesh, policy)
    sharded = fully_shard(
        experts.outermost, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, ignored_params=whole, **options
    )
    # Each process's experts saw the tokens of all, and their gradients are summed here over those with the same part.
    sharded.set_gradient_divide_factor(float(processes))
    # Summed, then divided: what NCCL would do in one is not there on other devices, and not for bf16. Alone there is
    # nothing to sum, and PyTorch (2.11 to 2.13) would divide twice.
    sharded.set_force_sum_reduction_for_comms(mesh.size() > 1)
