"""What several processes do with a model that is spread: experts in parts, FSDP2, both, with and without LoRA.

Run by ``tests/moe/test_sharded.py``; twenty steps of each layout are in ``tests/support/sharded_curves.py``.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.support.models import mapping, rows_of
from tests.support.sharded_models import ROWS, batch, device, gathered_gradients, mine, new_model, spread
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.moe import apply_expert_parallel, expert_mesh, fully_shard_model, gather_state_dict
from twinkle.moe.parts import find_experts, parts


def one_step(mesh: DeviceMesh, name: str, **policy: torch.dtype) -> None:
    """Other families; in lower precision the expected gradients are those of FSDP2 alone, for the same choices."""
    ep = 2
    single, parted = (presets.build(name).train().to(device()) for _ in range(2))
    if policy:  # of experts that are nearly alike the last bit may choose another one
        for model in (single, parted):
            _choose_by_place(model)
    policies = {"mp_policy": MixedPrecisionPolicy(**policy)}
    if policy:
        spread(single, 1, **policies)
    spread(parted, ep, **policies)
    inputs = presets.inputs(presets.build(name, device="meta"), batch=ROWS, device=device())
    presets.loss(single(**(mine(inputs) if policy else inputs))).backward()
    presets.loss(parted(**mine(inputs))).backward()
    for module in (single, parted):
        for parameter in module.parameters():  # no process had a use for it
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    expected, found = gathered_gradients(single), gathered_gradients(parted)
    assert list(expected) == list(found)
    for parameter, tensor in expected.items():
        # bf16 rounds every product and sum to 8 bits.
        rtol, atol = (5e-2, 5e-2 * float(tensor.abs().max())) if policy else (1e-4, 1e-6)
        torch.testing.assert_close(
            found[parameter], tensor, rtol=rtol, atol=atol, msg=lambda m, n=parameter: f"{n}: {m}"
        )


def _choose_by_place(model: nn.Module) -> None:
    """The router's weights stay its own."""

    def choose(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, index = output
        at = torch.arange(len(index), device=index.device)[:, None] + torch.arange(index.shape[1], device=index.device)
        return logits, weights, at % logits.shape[-1]

    for module_name, module in model.named_modules():
        if module_name.endswith("mlp.gate"):
            module.register_forward_hook(choose)


def kernels(mesh: DeviceMesh, first: bool) -> None:
    """With adapters; the kernel computes with the adapted weights of every call."""
    single, parted = new_model(True), new_model(True)
    if first:
        kernelize(parted, mapping("loopback", "qwen3_moe."))
    spread(parted, 2)
    if not first:
        kernelize(parted, mapping("loopback", "qwen3_moe."))
    for step in range(3):
        for model in (single, parted):
            inputs = batch(step) if model is single else mine(batch(step))
            loss = presets.loss(model(**inputs))
            loss.backward()
        expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
        for name, gradient in gathered_gradients(parted).items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, at=f"step {step}, {name}": f"{at}: {m}"
            )
        for model in (single, parted):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    row = rows_of(parted)["qwen3_moe.Qwen3MoeExperts.forward"]
    assert row.state == "installed" and row.calls == 3 * row.instances, row


def checkpointed(mesh: DeviceMesh) -> None:
    """Layers are computed again in the backward, collectives and adapters with them.

    Without tokens transformers' loop over the experts touches no weight: the others still have to be met there.
    """
    models = [new_model(True, few=True) for _ in range(2)]
    for model in models:
        model.set_experts_implementation("eager")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    single, parted = models
    spread(parted, dist.get_world_size())
    presets.loss(single(**batch(0))).backward()
    presets.loss(parted(**mine(batch(0)))).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    for name, gradient in gathered_gradients(parted).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def adapters_for_peft(mesh: DeviceMesh) -> None:
    """What is gathered from the adapters is PEFT's own format; the base model isn't gathered for it."""
    from peft import get_peft_model_state_dict

    single, parted = new_model(True), spread(new_model(True), 2)
    gathered = gather_state_dict(parted, names=lambda name: "lora_" in name, rank0_only=True)
    assert bool(gathered) == (dist.get_rank() == 0)
    if gathered:
        expected = get_peft_model_state_dict(single)
        found = get_peft_model_state_dict(parted, state_dict=gathered)
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def frozen(mesh: DeviceMesh) -> None:
    """Experts without adapters: whole on each process they aren't FSDP2's business, otherwise they are sharded."""
    from peft import LoraConfig, get_peft_model

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(get_peft_model(new_model(False), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    single, parted = models
    spread(parted, 2)
    alone = dist.get_world_size() == 2
    stacks = [experts.module.gate_up_proj for experts in find_experts(parted)]
    assert [isinstance(stack, DTensor) for stack in stacks] == [not alone] * len(stacks)
    presets.loss(single(**batch(0))).backward()
    presets.loss(parted(**mine(batch(0)))).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    found = gathered_gradients(parted)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    state = gather_state_dict(parted)
    assert all(torch.equal(state[name], tensor) for name, tensor in single.state_dict().items())


def few_experts_a_process(mesh: DeviceMesh) -> None:
    """Fewer than processes with the same part: then the stacks' second dimension is sharded."""
    model = spread(presets.build("qwen3_moe", num_experts=2), 1)
    assert not parts(model)
    world = dist.get_world_size()
    model = presets.build("qwen3_moe", num_experts=2 if world == 4 else world, mlp_only_layers=[])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spread(model, 2)
    stack = find_experts(model)[0].module.gate_up_proj
    assert stack.placements[0].dim == (1 if world == 4 else 0)
    found = gather_state_dict(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def refused(mesh: DeviceMesh) -> None:
    """One line that names the thing and the remedy; nothing is changed."""
    from peft import LoraConfig, get_peft_model

    world = dist.get_world_size()
    of_all = expert_mesh(world, device_type=device().type)

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("no error")

    fitting = ", ".join(str(size) for size in (1, 2, 4) if world % size == 0)
    assert error_of(lambda: expert_mesh(3, device_type=device().type)) == (
        f"{world} processes can't share experts 3 by 3; expert parallelism may be {fitting}"
    )
    assert "call apply_expert_parallel first" in error_of(lambda: fully_shard_model(new_model(False), of_all))
    assert "no dimension 'dp'; its dimensions: ('ep', 'fsdp')" in error_of(
        lambda: fully_shard_model(new_model(False), of_all, dim="dp")
    )
    sharded = spread(new_model(False), 1)
    assert "call apply_expert_parallel before fully_shard" in error_of(lambda: apply_expert_parallel(sharded, of_all))
    assert "pass layers=" in error_of(lambda: fully_shard_model(nn.Linear(2, 2), of_all))
    config = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj_bias"])
    adapted = get_peft_model(presets.build("gpt_oss"), config)
    before = {name: id(parameter) for name, parameter in adapted.named_parameters()}
    assert "adapt gate_up_proj and down_proj only" in error_of(lambda: apply_expert_parallel(adapted, of_all))
    assert before == {name: id(parameter) for name, parameter in adapted.named_parameters()}


CASES: dict[str, Callable[[DeviceMesh], None]] = {
    "one step of qwen3_5_moe": functools.partial(one_step, name="qwen3_5_moe"),
    "one step of gpt_oss": functools.partial(one_step, name="gpt_oss"),
    "one step of mixtral in bf16": functools.partial(
        one_step, name="mixtral", param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "kernels first": functools.partial(kernels, first=True),
    "kernels last": functools.partial(kernels, first=False),
    "checkpointed": checkpointed,
    "adapters for PEFT": adapters_for_peft,
    "frozen experts": frozen,
    "few experts a process": few_experts_a_process,
    "refused": refused,
}


def death(mesh: DeviceMesh) -> None:
    """The last process is killed in the middle of a step: in the others the step raises."""
    world = dist.get_world_size()
    model = spread(new_model(True), world)
    if dist.get_rank() == world - 1:
        module = find_experts(model)[-1].module
        module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    for step in range(3):
        presets.loss(model(**mine(batch(step)))).backward()
