"""Which parameters of a model are in parts, one for each process that shares the experts, and how the parts lie.

Beside the experts' stacks these are LoRA's factors for them, as PEFT keeps them: one pair for a whole stack, in a
wrapper around the experts (``LoraConfig(target_parameters=...)``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from twinkle.kernel.ops.moe.experts_reference import BIASES, WEIGHTS

STACKS = (*WEIGHTS, *BIASES)
"""Parameters of an experts module whose first dimension is the experts."""


class Part(NamedTuple):
    """How one process's part lies in the whole parameter, or anything of its shape.

    Attributes:
        experts: of all processes together.
        group: the processes, each with as many of the experts, in order.
        inner: the experts are the innermost part of the second dimension, not the outermost of the first. So lies the
            second factor of LoRA, ``[outputs, rank * experts]``; the first is ``[experts * rank, inputs]``.
    """

    experts: int
    group: dist.ProcessGroup
    inner: bool = False

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This process's part."""
        own, rank = self.experts // dist.get_world_size(self.group), dist.get_rank(self.group)
        dim, sizes = (1, (-1, self.experts)) if self.inner else (0, (self.experts, -1))
        at = 2 if self.inner else 0
        return whole.unflatten(dim, sizes).narrow(at, rank * own, own).flatten(dim, dim + 1).contiguous()

    def __deepcopy__(self, memo: object) -> Part:
        return self  # a copy of the model is in parts on the same processes

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, on every process: all have to call it."""
        processes = dist.get_world_size(self.group)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(processes)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        if not self.inner:
            return torch.cat(parts)
        own = self.experts // processes
        return torch.cat([one.unflatten(1, (-1, own)) for one in parts], dim=2).flatten(1)


class Experts(NamedTuple):
    """An experts module among its wrappers.

    Attributes:
        name: of the module itself, in the model.
        module: has the stacks.
        wrappers: PEFT's around it with their names, the outermost first.
    """

    name: str
    module: Any
    wrappers: tuple[tuple[str, Any], ...]

    @property
    def outermost(self) -> Any:
        """What the model calls."""
        return self.wrappers[0][1] if self.wrappers else self.module


def find_experts(model: nn.Module) -> list[Experts]:
    """The experts modules with stacked weights, in the order of the model."""
    modules = dict(model.named_modules())
    return [
        Experts(name, module, tuple(_wrappers(name, modules))) for name, module in modules.items() if is_experts(module)
    ]


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of several experts in stacks of its own."""
    stacks = (module._parameters.get(name) for name in WEIGHTS)
    return hasattr(module, "num_experts") and all(stack is not None and stack.dim() == 3 for stack in stacks)


def _wrappers(name: str, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    layer = sys.modules.get("peft.tuners.lora.layer")
    if layer is None:
        return
    names = []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        names.append(name)
    for outer in reversed(names):
        if isinstance(modules[outer], layer.ParamWrapper):
            yield outer, modules[outer]


def factors(wrapper: Any) -> Iterator[tuple[str, nn.Linear, bool]]:
    """Of a wrapper: a factor's name in it, the factor, whether it is the second one; for each of its adapters."""
    for which in ("lora_A", "lora_B"):
        for adapter, factor in getattr(wrapper, which).items():
            yield f"{which}.{adapter}", factor, which == "lora_B"


def part_of(module: Any) -> Part | None:
    """How the stacks of an experts module are in parts; None where the experts aren't shared."""
    part: Part | None = getattr(module, "_twinkle_part", None)
    return part


def mark(module: Any, part: Part) -> None:
    """Notes on an experts module that its stacks are in parts."""
    module._twinkle_part = part


def parts(model: nn.Module) -> dict[str, Part]:
    """Name of a parameter that is in parts -> how they lie; empty when the experts aren't shared."""
    found: dict[str, Part] = {}
    for name, module, wrappers in find_experts(model):
        part = part_of(module)
        if part is None:
            continue
        for stack in STACKS:
            if module._parameters.get(stack) is not None:
                found[f"{name}.{stack}" if name else stack] = part
        for outer, wrapper in wrappers:
            for factor, _, second in factors(wrapper):
                found[f"{outer}.{factor}.weight"] = part._replace(inner=second)
    return found
