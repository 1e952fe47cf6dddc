"""What two processes do with kernelized models: DDP and FSDP2 over gloo on the CPU. Run by ``test_distributed.py``.

Each case trains on one half of a batch per process; the gradients must be those of one process with the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import assert_close, differences, installed, look, mapping, rows_of, step
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.undo import unkernelize

WORLD = 2


def _half(model: nn.Module) -> dict[str, torch.Tensor]:
    inputs = presets.inputs(model, batch=WORLD)
    return {name: tensor[dist.get_rank()][None] for name, tensor in inputs.items()}


def _gradients(model: nn.Module, preset: str = "qwen3") -> dict[str, torch.Tensor]:
    """Whole gradients of one step, under the names that they have in a single process."""
    model.zero_grad(set_to_none=True)
    presets.loss(model(**_half(presets.build(preset, device="meta")))).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.removeprefix("module.")] = whole.detach().clone()
    model.zero_grad(set_to_none=True)
    return found


def _expected(preset: str = "qwen3") -> dict[str, torch.Tensor]:
    results = step(presets.build(preset), presets.inputs(presets.build(preset), batch=WORLD))
    return {name: tensor for name, tensor in results.items() if name != "logits"}


def _loopback(preset: str = "qwen3") -> dict[str, Any]:
    return mapping("loopback", f"{preset}.")


def _expected_rows(preset: str) -> dict[str, int | None]:
    with _kernelized(presets.build(preset), preset) as model:
        return installed(model)


@contextmanager
def _kernelized(model: nn.Module, preset: str) -> Iterator[nn.Module]:
    kernelize(model, _loopback(preset))
    yield model
    unkernelize(model)


def _assert_called(model: nn.Module) -> None:
    for target, row in rows_of(model).items():
        assert row.calls >= row.instances > 0, f"{target}: {row.calls} calls"


# --- DDP --------------------------------------------------------------------------------------------------------------


def ddp(mesh: DeviceMesh, kernels_first: bool) -> None:
    model = presets.build("qwen3")
    before, expected = look(model), _expected()
    if kernels_first:
        kernelize(model, _loopback())
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = DistributedDataParallel(model)
        kernelize(wrapped, _loopback())
    assert installed(wrapped) == installed(model) == _expected_rows("qwen3")
    assert_close(_gradients(wrapped), expected)
    _assert_called(wrapped)
    assert unkernelize(wrapped).not_undone == ()
    assert differences(before, look(model)) == [] and type(wrapped) is DistributedDataParallel
    assert_close(_gradients(wrapped), expected)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _shard(model: nn.Module, mesh: DeviceMesh, parts: bool, **options: Any) -> None:
    """Shards the layers and the model; with ``parts`` also each norm and MLP for itself."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        if parts:
            for name, module in layer.named_modules():
                if name.endswith("norm") or name == "mlp":
                    fully_shard(module, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    if parts:
        fully_shard(model.model.norm, mesh=mesh, **options)  # type: ignore[union-attr,arg-type]
    fully_shard(model, mesh=mesh, **options)


def fsdp(mesh: DeviceMesh, kernels_first: bool, parts: bool, preset: str = "qwen3") -> None:
    expected = _expected(preset)
    plain, model = presets.build(preset), presets.build(preset)
    names = [name for name, _ in model.named_parameters()]
    _shard(plain, mesh, parts)
    if kernels_first:
        kernelize(model, _loopback(preset))
        _shard(model, mesh, parts)
    else:
        _shard(model, mesh, parts)
        before = look(model)
        kernelize(model, _loopback(preset))
    assert installed(model) == _expected_rows(preset)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == [name for name, module in plain.named_modules() if isinstance(module, FSDPModule)]
    assert [name for name, _ in model.named_parameters()] == names

    assert_close(_gradients(model, preset), expected)
    _assert_called(model)
    _train(model, preset)

    assert unkernelize(model).not_undone == ()
    if not kernels_first:
        assert differences(before, look(model)) == []  # the very classes that fully_shard made
    for (name, ours), theirs in zip(model.named_modules(), plain.modules(), strict=True):
        _assert_equivalent(name, type(ours), type(theirs))
    _train(plain, preset)
    assert_close(_gradients(model, preset), _gradients(plain, preset))
    _train(model, preset)

    kernelize(model, _loopback(preset))
    assert installed(model) == _expected_rows(preset)
    _train(plain, preset)
    assert_close(_gradients(model, preset), _gradients(plain, preset))
    assert unkernelize(model).not_undone == ()
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == sharded


def _assert_equivalent(name: str, ours: type, theirs: type) -> None:
    assert installed_on(ours) is None and ours.__name__ == theirs.__name__, name
    assert ours.__bases__ == theirs.__bases__ and ours.__module__ == theirs.__module__, name
    added = {key: value for key, value in vars(ours).items() if key != "__doc__"}
    assert added.keys() == {key for key in vars(theirs) if key != "__doc__"}, name


def _train(model: nn.Module, preset: str) -> None:
    """One step of SGD, and what else FSDP2's classes offer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    presets.loss(model(**_half(presets.build(preset, device="meta")))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
            module.set_requires_gradient_sync(True, recurse=False)


def fsdp_in_bf16(mesh: DeviceMesh, kernels_first: bool) -> None:
    """The weights are fp32 when the plan is made, bf16 in the calls."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, model = presets.build("qwen3"), presets.build("qwen3")
    _shard(plain, mesh, True, mp_policy=policy)
    if kernels_first:
        kernelize(model, _loopback())
        _shard(model, mesh, True, mp_policy=policy)
    else:
        _shard(model, mesh, True, mp_policy=policy)
        kernelize(model, _loopback())
    ours, theirs = _gradients(model), _gradients(plain)
    _assert_called(model)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=5e-2, atol=5e-2 * float(tensor.abs().max()))
    unkernelize(model)
    assert_close(_gradients(model), theirs)


def fsdp_still_refuses_a_deep_copy(mesh: DeviceMesh, kernels_first: bool) -> None:
    model = presets.build("qwen3")
    if kernels_first:
        kernelize(model, _loopback())
    _shard(model, mesh, True)
    kernelize(model, _loopback())
    for module in (model.model.norm, model):
        try:
            copy.deepcopy(module)
        except AssertionError as error:
            assert "deepcopy" in str(error)
        else:
            raise AssertionError("a sharded module was copied")
    unkernelize(model)


# --- running them -----------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[DeviceMesh], None]] = {}
for _first in (True, False):
    _order = "kernelize first" if _first else "kernelize last"
    CASES |= {
        f"ddp, {_order}": lambda mesh, first=_first: ddp(mesh, first),
        f"fsdp of layers, {_order}": lambda mesh, first=_first: fsdp(mesh, first, False),
        f"fsdp of norms and MLPs, {_order}": lambda mesh, first=_first: fsdp(mesh, first, True),
        f"fsdp of experts, {_order}": lambda mesh, first=_first: fsdp(mesh, first, True, "qwen3_moe"),
        f"fsdp in bf16, {_order}": lambda mesh, first=_first: fsdp_in_bf16(mesh, first),
        f"fsdp and deepcopy, {_order}": lambda mesh, first=_first: fsdp_still_refuses_a_deep_copy(mesh, first),
    }
