"""Twenty steps of a model that is spread, judged against one process. Run by ``tests/moe/test_sharded.py``.

Each process has its part of a batch. Losses and gradients may differ from those of one process with the whole batch by
what the order of summation does to that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tests.support.sharded_models import (
    batch,
    device,
    gathered_gradients,
    mine,
    new_model,
    optimizer_of,
    shares,
    spread,
    with_adapters,
)
from twinkle import presets
from twinkle.commands.demo.outcome import judge_losses
from twinkle.kernel.exact import exact_copy, exactly
from twinkle.kernel.verify import allowed_error_used
from twinkle.moe import (
    apply_expert_parallel,
    clip_grad_norm_,
    expert_mesh,
    fully_shard_model,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    load_state_dict,
)

Batch = dict[str, torch.Tensor]
STEPS, SAVED_AT = 20, 10
ORDERS = 5
"""Three agree by chance now and then, to a bit or two, and judge hundreds of losses here."""
CLIP = 1.0


class Curve(NamedTuple):
    """A training of one process.

    Attributes:
        losses: by step.
        norms: of all gradients, by step.
        gradients: of the first step.
        model, optimizer: in a single process's format, at step :data:`SAVED_AT`.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[[int], list[Batch]],
    first: int = 0,
) -> Curve:
    """From that step on; ``take(step)`` gives a batch in equal parts, whose gradients are added up."""
    losses, norms, gradients, state, moments = [], [], {}, {}, {}
    for step in range(first, STEPS):
        if step == SAVED_AT:
            state = {name: tensor.clone() for name, tensor in gather_state_dict(model).items()}
            moments = gather_optimizer_state(model, optimizer)
            moments["state"] = {
                name: {key: value.clone() for key, value in entry.items()} for name, entry in moments["state"].items()
            }
        parts = take(step)
        of_parts = []
        for part in parts:
            loss = presets.loss(model(**part)) / len(parts)
            loss.backward()
            of_parts.append(loss.item())
        if step == 0:
            gradients = gathered_gradients(model)
        alone = not any(isinstance(p, DTensor) for p in model.parameters())
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), CLIP) if alone else clip_grad_norm_(model, CLIP))
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_parts))
    return Curve(losses, norms, gradients, state, moments)


@functools.cache
def _alone(lora: bool, few: bool) -> list[Curve]:
    """A training of one process in each order of summation. Each process does some of them, and all get all."""
    found: list[Any] = [None] * dist.get_world_size()
    own = {order: _in_order(lora, few, order) for order in range(dist.get_rank(), ORDERS, len(found))}
    dist.all_gather_object(found, _on("cpu", own))
    every = {order: curve for of_process in found for order, curve in of_process.items()}
    return [_on(device(), every[order]) for order in range(ORDERS)]


def _on(where: torch.device | str, tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), tree)


def _in_order(lora: bool, few: bool, order: int) -> Curve:
    """In one of the orders of summation: of the rows, and of the experts as transformers has them.

    In every other the rows are in as many parts as there are processes. Ours are, too, and products of fewer rows are
    added up in another order.
    """
    model = new_model(lora, few)
    by = ("eager", "batched_mm") if device().type == "cuda" else ("grouped_mm", "eager", "batched_mm")
    model.set_experts_implementation(by[order % len(by)])
    among = dist.get_world_size() if order % 2 else 1
    return _steps(model, optimizer_of(model), lambda step: shares(batch(step, order), among))


@functools.cache
def _exact_gradients(lora: bool, few: bool) -> dict[str, torch.Tensor]:
    model = exact_copy(new_model(lora, few))
    with exactly(model):
        presets.loss(model(**batch(0))).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _judge_losses(losses: list[float], lora: bool, few: bool, first: int = 0) -> None:
    """Judges the mean over the processes."""
    total = torch.tensor(losses, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    mean = (total / dist.get_world_size()).tolist()
    orders = [alone.losses for alone in _alone(lora, few)]
    judged = judge_losses(orders[0][:first] + mean, orders)
    worst = max(range(STEPS), key=lambda step: judged[step].used)
    assert judged[worst].used <= 1, f"step {worst}: {judged[worst]}"
    assert len(losses) + first == STEPS and orders[0][-1] < 0.9 * orders[0][0], "it learns"


def _judge_norms(ours: Curve, lora: bool, few: bool) -> None:
    """Beside the spread, a norm may differ by its own rounding: each gradient's part of it is rounded, and each sum.

    These are as many as there are gradients, and the root halves their relative error; ours has it and theirs.
    """
    rounding = len(ours.gradients) / 2 * torch.finfo(torch.float32).eps
    of_first = torch.stack([gradient.double().norm() for gradient in ours.gradients.values()]).norm().item()
    assert abs(ours.norms[0] - of_first) <= rounding * of_first, (ours.norms[0], of_first)
    judged = judge_losses(ours.norms, [alone.norms for alone in _alone(lora, few)])
    used = [step.distance / (step.allowed + rounding * norm) for step, norm in zip(judged, ours.norms, strict=True)]
    assert max(used) <= 1, f"the norms of all gradients: {used}"


def curve(mesh: DeviceMesh, ep: int, lora: str | None, few: bool = False) -> None:
    """Losses, gradients and norms of one process; its checkpoint is taken up, and it takes up ours."""
    adapted = lora is not None
    orders = _alone(adapted, few)
    single = orders[0]
    if lora == "after":
        mesh_of_all = expert_mesh(ep, device_type=device().type)
        model = with_adapters(apply_expert_parallel(new_model(False, few), mesh_of_all))
        load_state_dict(model, new_model(True, few).state_dict())
        fully_shard_model(model, mesh_of_all)
    else:
        model = spread(new_model(adapted, few), ep)
    ours = _steps(model, optimizer_of(model), lambda step: [mine(batch(step))])
    _judge_losses(ours.losses, adapted, few)
    exact = _exact_gradients(adapted, few)
    assert list(ours.gradients) == list(single.gradients) == list(exact)
    for name, gradient in ours.gradients.items():
        used = min(allowed_error_used(gradient, alone.gradients[name], exact[name]) for alone in orders)
        assert used <= 1, f"{name}: {used}"
    _judge_norms(ours, adapted, few)

    again = new_model(adapted, few)
    load_state_dict(again, ours.model)
    optimizer = optimizer_of(again)
    load_optimizer_state(again, optimizer, ours.optimizer)
    resumed = _steps(again, optimizer, lambda step: [batch(step)], SAVED_AT)
    _judge_losses(resumed.losses, adapted, few, SAVED_AT)

    again = spread(new_model(adapted, few), ep)
    load_state_dict(again, single.model)
    optimizer = optimizer_of(again)
    load_optimizer_state(again, optimizer, single.optimizer)
    resumed = _steps(again, optimizer, lambda step: [mine(batch(step))], SAVED_AT)
    _judge_losses(resumed.losses, adapted, few, SAVED_AT)


def _curve(mesh: DeviceMesh, share: Callable[[int], int], **options: Any) -> None:
    curve(mesh, share(dist.get_world_size()), **options)


LAYOUTS: dict[str, Callable[[int], int]] = {
    "FSDP2": lambda world: 1,
    "expert parallel": lambda world: world,
    "expert parallel and FSDP2": lambda world: max(world // 2, 1),
}
CURVES: dict[str, Callable[[DeviceMesh], None]] = {
    f"{layout}, adapters {lora}": functools.partial(_curve, share=share, lora=lora)
    for layout, share in LAYOUTS.items()
    for lora in (None, "before")
} | {
    "adapters after": functools.partial(_curve, share=LAYOUTS["expert parallel"], lora="after"),
    "processes without tokens": functools.partial(_curve, share=LAYOUTS["expert parallel"], lora=None, few=True),
    "adapters without tokens": functools.partial(_curve, share=LAYOUTS["expert parallel"], lora="before", few=True),
}
