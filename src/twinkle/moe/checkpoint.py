"""State dicts in the format of a single process, however the model is spread: experts in parts, FSDP2, or both.

What was saved by any number of processes can so be loaded by any other, and by programs that know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle.moe.parts import Part, parts


def gather_state_dict(
    model: nn.Module, *, names: Callable[[str], bool] = lambda name: True, rank0_only: bool = False
) -> dict[str, torch.Tensor]:
    """The state dict of the whole model. All processes have to call it.

    Args:
        names: which entries, by name.
        rank0_only: the first process gets them, on the CPU, and the others nothing: one tensor at a time is whole on
            the devices.

    Returns:
        tensors, none of them a ``DTensor``.
    """
    known = parts(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if names(name)}
    return _gathered({name: (tensor, known.get(name)) for name, tensor in state.items()}, rank0_only)


def load_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Loads a whole model's state dict, of which each process takes its part.

    Returns:
        missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: as that.
    """
    known, own = parts(model), model.state_dict()
    placed = {name: _placed(whole, own.get(name), known.get(name)) for name, whole in state.items()}
    return model.load_state_dict(placed, strict=strict)


def gather_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """An optimizer's state by the names of the model's parameters. All processes have to call it.

    Args:
        rank0_only: see :func:`gather_state_dict`.

    Returns:
        ``{"state": {parameter: {key: tensor or number}}, "param_groups": [...]}``, as PyTorch's
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, with whole tensors.
    """
    found: dict[str, Any] = dcp.get_optimizer_state_dict(model, optimizer)
    known, shapes = parts(model), {name: parameter.shape for name, parameter in model.named_parameters()}
    flat = {
        (name, key): (value, known.get(name) if getattr(value, "shape", None) == shapes[name] else None)
        for name, entry in found["state"].items()
        for key, value in entry.items()
    }
    state: dict[str, dict[str, Any]] = {}
    for (name, key), value in _gathered(flat, rank0_only).items():
        state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": found["param_groups"]}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads what :func:`gather_optimizer_state` gave, in every process, however the model is spread now.

    Raises:
        KeyError, RuntimeError: it is another model's or another optimizer's.
    """
    known, own = parts(model), dict(model.named_parameters())

    def place(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim():  # a number of steps has no dimensions
            value = _placed(value, own[name], known.get(name))
        return value.clone()  # the optimizer takes it as it is, and will write into it

    placed = {name: {key: place(name, value) for key, value in entry.items()} for name, entry in state["state"].items()}
    whole: dict[str, Any] = {"state": placed, "param_groups": state["param_groups"]}
    dcp.set_optimizer_state_dict(model, optimizer, whole)


def _gathered(found: Mapping[Any, tuple[Any, Part | None]], rank0_only: bool) -> dict[Any, Any]:
    gathered = {}
    for name, (value, part) in found.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if part is not None:
            value = part.gather(value)
        if not rank0_only:
            gathered[name] = value
        elif dist.get_rank() == 0:
            gathered[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return gathered


def _placed(whole: torch.Tensor, like: torch.Tensor | None, part: Part | None) -> torch.Tensor:
    """Of a whole tensor what this process has of ``like``."""
    if part is not None:
        whole = part.cut(whole)
    if not isinstance(like, DTensor):
        return whole
    # Every process has the whole, so nothing is sent.
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
