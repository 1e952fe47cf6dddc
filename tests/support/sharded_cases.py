"""What several processes do with a model that is spread: experts in parts, FSDP2, both, with and without LoRA.

Run by ``tests/moe/test_sharded.py``. Twenty steps on the processes' parts of a batch; losses and gradients are judged
against one process with the whole batch, by what the order of summation does to that one.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.support.models import mapping, rows_of
from twinkle import presets
from twinkle.commands.demo.outcome import judge_losses
from twinkle.kernel import kernelize
from twinkle.kernel.exact import KeepFloat64, exact_copy
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
    parameter_groups,
)
from twinkle.moe.parts import find_experts, parts

STEPS, SAVED_AT, ROWS, ORDERS = 20, 10, 8, 3
CLIP = 1.0
TO_FEW = "to few experts"
"""Every token to the first two experts, so that whoever owns others gets none."""


def device() -> torch.device:
    """This process's."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _new_model(lora: bool, few: bool = False) -> nn.Module:
    """Two mixture-of-experts layers; with adapters on the attention, the router and the experts."""
    model = presets.build("qwen3_moe", mlp_only_layers=[]).train()
    if few:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(_choose_the_first)
    if device().type == "cuda":  # where PyTorch has no grouped product in fp32
        model.set_experts_implementation("eager")
    return (with_adapters(model) if lora else model).to(device())


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, and then the first factors would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return adapted


def _choose_the_first(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    logits, weights, index = output
    return logits, weights, torch.arange(index.shape[1], device=index.device).expand_as(index)


def _spread(model: nn.Module, ep: int, **options: Any) -> nn.Module:
    mesh = expert_mesh(ep, device_type=device().type)
    return fully_shard_model(apply_expert_parallel(model, mesh), mesh, **options)


def _batch(step: int, order: int = 0) -> dict[str, torch.Tensor]:
    inputs = presets.inputs(presets.build("qwen3_moe", device="meta"), batch=ROWS, seed=step % 3, device="cpu")
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(order)) if order else torch.arange(ROWS)
    return {name: tensor[rows].to(device()) for name, tensor in inputs.items()}


def _mine(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in inputs.items()}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    adapted = any("lora_" in name for name, _ in model.named_parameters())
    return torch.optim.AdamW(parameter_groups(model), lr=2e-2 if adapted else 2e-3)


def gathered_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients of a spread model, under the names of a single process."""
    known, found = parts(model), {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = known[name].gather(gradient) if name in known else gradient.clone()
    return found


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
    model: nn.Module, optimizer: torch.optim.Optimizer, take: Callable[[int], dict[str, torch.Tensor]], first: int = 0
) -> Curve:
    losses, norms, gradients, state, moments = [], [], {}, {}, {}
    for step in range(first, STEPS):
        if step == SAVED_AT:
            state = {name: tensor.clone() for name, tensor in gather_state_dict(model).items()}
            moments = gather_optimizer_state(model, optimizer)
            moments["state"] = {
                name: {key: value.clone() for key, value in entry.items()} for name, entry in moments["state"].items()
            }
        loss = presets.loss(model(**take(step)))
        loss.backward()
        if step == 0:
            gradients = gathered_gradients(model)
        alone = not any(isinstance(p, DTensor) for p in model.parameters())
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), CLIP) if alone else clip_grad_norm_(model, CLIP))
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Curve(losses, norms, gradients, state, moments)


@functools.cache
def _alone(lora: bool, few: bool, order: int) -> Curve:
    """In one of the orders of summation: of the rows, and of the experts as transformers has them."""
    model = _new_model(lora, few)
    by = ("eager", "batched_mm", "eager") if device().type == "cuda" else ("grouped_mm", "eager", "batched_mm")
    model.set_experts_implementation(by[order])
    return _steps(model, _optimizer(model), functools.partial(_batch, order=order))


@functools.cache
def _exact_gradients(lora: bool, few: bool) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        model = exact_copy(_new_model(lora, few))
        presets.loss(model(**_batch(0))).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _judge_losses(losses: list[float], lora: bool, few: bool, first: int = 0) -> None:
    """Judges the mean over the processes."""
    total = torch.tensor(losses, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    mean = (total / dist.get_world_size()).tolist()
    orders = [_alone(lora, few, order).losses for order in range(ORDERS)]
    judged = judge_losses(orders[0][:first] + mean, orders)
    worst = max(range(STEPS), key=lambda step: judged[step].used)
    assert judged[worst].used <= 1, f"step {worst}: {judged[worst]}"
    assert len(losses) + first == STEPS and orders[0][-1] < 0.9 * orders[0][0], "it learns"


def curve(mesh: DeviceMesh, ep: int, lora: str | None, few: bool = False) -> None:
    """Losses, gradients and norms of one process; its checkpoint is taken up, and it takes up ours."""
    adapted = lora is not None
    single = _alone(adapted, few, 0)
    if lora == "after":
        mesh_of_all = expert_mesh(ep, device_type=device().type)
        model = with_adapters(apply_expert_parallel(_new_model(False, few), mesh_of_all))
        load_state_dict(model, _new_model(True, few).state_dict())
        fully_shard_model(model, mesh_of_all)
    else:
        model = _spread(_new_model(adapted, few), ep)
    ours = _steps(model, _optimizer(model), lambda step: _mine(_batch(step)))
    _judge_losses(ours.losses, adapted, few)
    exact = _exact_gradients(adapted, few)
    assert list(ours.gradients) == list(single.gradients) == list(exact)
    for name, gradient in ours.gradients.items():
        originals = [_alone(adapted, few, order).gradients[name] for order in range(ORDERS)]
        used = min(allowed_error_used(gradient, original, exact[name]) for original in originals)
        assert used <= 1, f"{name}: {used}"
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(single.norms), rtol=1e-4, atol=0.0)

    again = _new_model(adapted, few)
    load_state_dict(again, ours.model)
    optimizer = _optimizer(again)
    load_optimizer_state(again, optimizer, ours.optimizer)
    _judge_losses(_steps(again, optimizer, _batch, SAVED_AT).losses, adapted, few, SAVED_AT)

    again = _spread(_new_model(adapted, few), ep)
    load_state_dict(again, single.model)
    optimizer = _optimizer(again)
    load_optimizer_state(again, optimizer, single.optimizer)
    resumed = _steps(again, optimizer, lambda step: _mine(_batch(step)), SAVED_AT)
    _judge_losses(resumed.losses, adapted, few, SAVED_AT)


def one_step(mesh: DeviceMesh, name: str, **policy: torch.dtype) -> None:
    """Other families; in lower precision the expected gradients are those of FSDP2 alone."""
    ep = 2
    single, spread = (presets.build(name).train().to(device()) for _ in range(2))
    policies = {"mp_policy": MixedPrecisionPolicy(**policy)}
    if policy:
        _spread(single, 1, **policies)
    _spread(spread, ep, **policies)
    inputs = presets.inputs(presets.build(name, device="meta"), batch=ROWS, device=device())
    presets.loss(single(**(_mine(inputs) if policy else inputs))).backward()
    presets.loss(spread(**_mine(inputs))).backward()
    for module in (single, spread):
        for parameter in module.parameters():  # no process had a use for it
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    expected, found = gathered_gradients(single), gathered_gradients(spread)
    assert list(expected) == list(found)
    for parameter, tensor in expected.items():
        # bf16 rounds every product and sum to 8 bits.
        rtol, atol = (5e-2, 5e-2 * float(tensor.abs().max())) if policy else (1e-4, 1e-6)
        torch.testing.assert_close(
            found[parameter], tensor, rtol=rtol, atol=atol, msg=lambda m, n=parameter: f"{n}: {m}"
        )


def kernels(mesh: DeviceMesh, first: bool) -> None:
    """With adapters; the kernel computes with the adapted weights of every call."""
    single, spread = _new_model(True), _new_model(True)
    if first:
        kernelize(spread, mapping("loopback", "qwen3_moe."))
    _spread(spread, 2)
    if not first:
        kernelize(spread, mapping("loopback", "qwen3_moe."))
    for step in range(3):
        for model in (single, spread):
            inputs = _batch(step) if model is single else _mine(_batch(step))
            loss = presets.loss(model(**inputs))
            loss.backward()
        expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
        for name, gradient in gathered_gradients(spread).items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, at=f"step {step}, {name}": f"{at}: {m}"
            )
        for model in (single, spread):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    row = rows_of(spread)["qwen3_moe.Qwen3MoeExperts.forward"]
    assert row.state == "installed" and row.calls == 3 * row.instances, row


def checkpointed(mesh: DeviceMesh) -> None:
    """Layers are computed again in the backward, collectives and adapters with them.

    Without tokens transformers' loop over the experts touches no weight: the others still have to be met there.
    """
    models = [_new_model(True, few=True) for _ in range(2)]
    for model in models:
        model.set_experts_implementation("eager")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    single, spread = models
    _spread(spread, dist.get_world_size())
    presets.loss(single(**_batch(0))).backward()
    presets.loss(spread(**_mine(_batch(0)))).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    for name, gradient in gathered_gradients(spread).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def adapters_for_peft(mesh: DeviceMesh) -> None:
    """What is gathered from the adapters is PEFT's own format; the base model isn't gathered for it."""
    from peft import get_peft_model_state_dict

    single, spread = _new_model(True), _spread(_new_model(True), 2)
    gathered = gather_state_dict(spread, names=lambda name: "lora_" in name, rank0_only=True)
    assert bool(gathered) == (dist.get_rank() == 0)
    if gathered:
        expected = get_peft_model_state_dict(single)
        found = get_peft_model_state_dict(spread, state_dict=gathered)
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def frozen(mesh: DeviceMesh) -> None:
    """Experts without adapters: whole on each process they aren't FSDP2's business, otherwise they are sharded."""
    from peft import LoraConfig, get_peft_model

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(get_peft_model(_new_model(False), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    single, spread = models
    _spread(spread, 2)
    alone = dist.get_world_size() == 2
    stacks = [experts.module.gate_up_proj for experts in find_experts(spread)]
    assert [isinstance(stack, DTensor) for stack in stacks] == [not alone] * len(stacks)
    presets.loss(single(**_batch(0))).backward()
    presets.loss(spread(**_mine(_batch(0)))).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    found = gathered_gradients(spread)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    state = gather_state_dict(spread)
    assert all(torch.equal(state[name], tensor) for name, tensor in single.state_dict().items())


def few_experts_a_process(mesh: DeviceMesh) -> None:
    """Fewer than processes with the same part: then the stacks' second dimension is sharded."""
    model = _spread(presets.build("qwen3_moe", num_experts=2), 1)
    assert not parts(model)
    world = dist.get_world_size()
    model = presets.build("qwen3_moe", num_experts=2 if world == 4 else world, mlp_only_layers=[])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _spread(model, 2)
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
    assert "call apply_expert_parallel first" in error_of(lambda: fully_shard_model(_new_model(False), of_all))
    assert "no dimension 'dp'; its dimensions: ('ep', 'fsdp')" in error_of(
        lambda: fully_shard_model(_new_model(False), of_all, dim="dp")
    )
    sharded = _spread(_new_model(False), 1)
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


def death(mesh: DeviceMesh) -> None:
    """The last process is killed in the middle of a step: in the others the step raises."""
    world = dist.get_world_size()
    model = _spread(_new_model(True), world)
    if dist.get_rank() == world - 1:
        module = find_experts(model)[-1].module
        module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    _steps(model, _optimizer(model), lambda step: _mine(_batch(step)))
