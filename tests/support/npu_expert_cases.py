"""Experts shared by several processes that have simulated NPUs. Run by ``tests/npu/test_expert_parallel.py``.

What is sent goes through the CPU, since nothing carries tensors of that device from one process to another; what is
computed at either end isn't changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests import simulated_device
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.moe import apply_expert_parallel, dispatch

ON_CPU = dist.all_to_all_single


def _through_the_cpu(output: torch.Tensor, sent: torch.Tensor, *sizes: Any, group: Any = None) -> None:
    received = torch.empty_like(output, device="cpu")
    ON_CPU(received, sent.cpu(), *sizes, group=group)
    output.copy_(received)


def _model(seed: int = 0) -> Any:
    return presets.build("qwen3_moe", dtype=torch.bfloat16, device="npu", seed=seed).train()


def _step(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the first layer's gradient, which everything behind it has a part in."""
    loss = presets.loss(model(**inputs))
    loss.backward()
    return loss.detach().cpu().float(), model.model.layers[0].self_attn.v_proj.weight.grad.cpu().float()


def serves(mesh: DeviceMesh, first: bool) -> None:
    """The grouped product computes a process's experts, whether kernelize came first or last."""
    simulated_device.load("npu")
    world, rank = dist.get_world_size(), dist.get_rank()
    with mock.patch.object(dispatch.dist, "all_to_all_single", _through_the_cpu):
        single, shared = _model(), _model()
        batch = presets.inputs(single, batch=2 * world, device="npu")
        mine = {key: value.chunk(world)[rank] for key, value in batch.items()}
        if first:
            kernelize(shared)
        apply_expert_parallel(shared, mesh)
        if not first:
            kernelize(shared)
        loss, gradient = _step(shared, mine)
        row = next(row for row in report(shared).rows if row.op == "moe_experts" and row.state == "installed")
        assert (row.backend, row.instances, row.calls, row.fallbacks) == ("npu", 1, 1, {}), row
    expected, right = _step(single, batch)
    for found in (loss, gradient):
        dist.all_reduce(found)
        found /= world
    assert (loss - expected).abs() <= 0.02 * expected, (loss, expected)
    assert (gradient - right).norm() <= 0.1 * right.norm(), float((gradient - right).norm() / right.norm())


CASES: dict[str, Callable[[DeviceMesh], None]] = {
    "kernels first": lambda mesh: serves(mesh, first=True),
    "kernels last": lambda mesh: serves(mesh, first=False),
}
