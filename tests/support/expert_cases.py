"""What several processes do with shared experts. Run by ``tests/moe/test_expert_parallel.py``.

Each process has its part of a batch; losses and gradients must be those of one process with the whole batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import mapping, rows_of
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.undo import unkernelize
from twinkle.moe import apply_expert_parallel, gather_state_dict, load_state_dict
from twinkle.moe.dispatch import Dispatch, combine, dispatch
from twinkle.moe.parts import is_experts

Change = Callable[[nn.Module], Any]


def _build(name: str) -> nn.Module:
    """In training mode without dropout."""
    model = presets.build(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _batch(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return presets.inputs(presets.build(name, device="meta"), batch=2 * dist.get_world_size(), seed=seed, device="cpu")


def _mine(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in inputs.items()}


def _loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return presets.loss(model(**inputs))


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    """Over all processes."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the mean loss, whole: experts' parts put together, the others' averaged."""
    owned = {id(p) for module in model.modules() if is_experts(module) for p in module.parameters(recurse=False)}
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if id(parameter) in owned and dist.get_world_size() > 1:
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad.contiguous())
            found[name] = torch.cat(parts) / dist.get_world_size()
        else:
            found[name] = _mean(parameter.grad)
    return found


def _assert_equal_step(single: nn.Module, shared: nn.Module, name: str) -> None:
    inputs = _batch(name)
    expected = _loss(single, inputs)
    expected.backward()
    found = _loss(shared, _mine(inputs))
    found.backward()
    torch.testing.assert_close(_mean(found), expected.detach())
    ours = _gradients(shared)
    for parameter_name, parameter in single.named_parameters():
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            ours[parameter_name], theirs, rtol=1e-4, atol=1e-6, msg=lambda m, n=parameter_name: f"{n}: {m}"
        )
    single.zero_grad()
    shared.zero_grad()


def one_step(
    mesh: DeviceMesh, name: str, change: Change = lambda model: None, after: Change = lambda model: None
) -> None:
    """The same step by one process with all experts, and by all with a part each."""
    single, shared = _build(name), _build(name)
    change(single)
    change(shared)
    assert apply_expert_parallel(shared, mesh) is shared
    after(shared)
    _assert_equal_step(single, shared, name)


def _to_the_first_experts(model: nn.Module) -> None:
    """Every token to the same few experts: whoever owns none of them gets nothing."""

    def choose(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, index = output
        return logits, weights, torch.arange(index.shape[1]).expand_as(index)

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(choose)


def _loopback(model: nn.Module) -> None:
    kernelize(model, mapping("loopback", "qwen3_moe."))


def kernels(mesh: DeviceMesh, first: bool) -> None:
    """A kernel computes a process's experts, whichever came first; it can be taken off."""
    single, shared = _build("qwen3_moe"), _build("qwen3_moe")
    if first:
        _loopback(shared)
    apply_expert_parallel(shared, mesh)
    if not first:
        _loopback(shared)
    _assert_equal_step(single, shared, "qwen3_moe")
    row = rows_of(shared)["qwen3_moe.Qwen3MoeExperts.forward"]
    assert row.instances and row.calls == row.instances, row
    assert unkernelize(shared).not_undone == ()
    _assert_equal_step(single, shared, "qwen3_moe")


def called_by_name(mesh: DeviceMesh) -> None:
    """Arguments may be named, in any order; and a call that failed leaves nothing behind for the next."""
    single, shared = _build("qwen3_moe"), apply_expert_parallel(_build("qwen3_moe"), mesh)
    experts, parts = (next(module for module in model.modules() if is_experts(module)) for model in (single, shared))
    x = torch.randn(5, experts.gate_up_proj.shape[2])  # type: ignore[union-attr,index]
    index, weights = torch.arange(10).view(5, 2) % 4, torch.rand(5, 2)
    expected = experts(x, index, weights)
    named = {"top_k_weights": weights, "top_k_index": index, "hidden_states": x}
    torch.testing.assert_close(parts(**named), expected)
    activation, parts.act_fn = parts.act_fn, None
    try:
        parts(x, index, weights)
    except TypeError:
        pass
    else:
        raise AssertionError("no error")
    parts.act_fn = activation
    found = parts(x, index, weights)
    torch.testing.assert_close(found, expected)
    assert not found._is_view()
    found += x  # as blocks with a shared expert do
    assert parts._twinkle_under_way is None


class _Call(NamedTuple):
    """Experts that multiply a row by a number, computed by all processes, and by this one alone for its tokens."""

    inputs: tuple[torch.Tensor, torch.Tensor]
    index: torch.Tensor
    sent: Dispatch
    local: torch.Tensor
    found: torch.Tensor
    expected: torch.Tensor


OWN, TOKENS, CHOICES = 3, 40, 4


def _call(
    mesh: DeviceMesh,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    needed: tuple[bool, bool] = (True, True),
) -> _Call:
    """Of rows and weights with these dtypes, of which a process needs those gradients."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    experts = OWN * world
    index = torch.randint(-1, experts + 1, (TOKENS, CHOICES), generator=generator)  # beyond either end is nobody
    x, weights, factors = (
        torch.rand(*shape, generator=generator) for shape in ((TOKENS, 5), (TOKENS, CHOICES), (experts, 1))
    )
    dist.broadcast(factors, 0)
    x, weights = (
        tensor.to(dtype).requires_grad_(need) for tensor, dtype, need in zip((x, weights), dtypes, needed, strict=True)
    )
    group = mesh.get_group("ep")
    sent, local = dispatch(x, index, weights, experts, group)
    results = sent.rows * sent.weights.to(x.dtype) * factors[rank * OWN + local].to(x.dtype)
    found = combine(results, sent, group)
    known = (index >= 0) & (index < experts)
    given = weights.double() * known * factors[index.clamp(0, experts - 1), 0]
    expected = (x.double()[:, None] * given[..., None]).sum(1)
    return _Call((x, weights), index, sent, local, found, expected)


def _assert_equal_gradients(call: _Call, **tolerances: float) -> None:
    torch.testing.assert_close(call.found.double(), call.expected, **tolerances)
    needed = [tensor for tensor in call.inputs if tensor.requires_grad]
    seed = torch.linspace(-1, 1, call.found.numel()).view_as(call.found)
    ours, theirs = (
        torch.autograd.grad(result, needed, seed.to(result.dtype)) for result in (call.found, call.expected)
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, **tolerances)


def sent_once(mesh: DeviceMesh) -> None:
    """A row travels once to each process that has experts of it, whatever their number, and its gradient comes back."""
    experts = OWN * dist.get_world_size()
    call = _call(mesh)
    index, local = call.index, call.local
    wanted = {(token, int(one) // OWN) for token, row in enumerate(index) for one in row if 0 <= one < experts}
    assert sum(call.sent.sent) == len(wanted) < int(((index >= 0) & (index < experts)).sum())
    assert len(local) == len(call.sent.rows) and torch.equal(local, local.sort().values)
    _assert_equal_gradients(call, rtol=1e-5, atol=1e-6)


def any_dtypes(mesh: DeviceMesh) -> None:
    """The weights travel in the same exchange as the rows, as exact as they are."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for rows, weights in ((half, half), (half, single), (half, double), (single, double), (double, single)):
        call = _call(mesh, (rows, weights))
        assert call.sent.rows.dtype == rows and call.sent.weights.dtype == weights
        known = (call.index >= 0) & (call.index < OWN * dist.get_world_size())
        total = call.sent.weights.detach().sum(dtype=double).reshape(1)
        dist.all_reduce(total)
        expected = (call.inputs[1].detach() * known).sum(dtype=double).reshape(1)
        dist.all_reduce(expected)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        rough = half in (rows, weights)
        _assert_equal_gradients(call, rtol=3e-2 if rough else 1e-5, atol=3e-2 if rough else 1e-6)


def three_exchanges(mesh: DeviceMesh) -> None:
    """The sizes, the rows, and the results; two for the gradients."""
    with _Exchanges() as forward:
        call = _call(mesh)
    with _Exchanges() as backward:
        call.found.sum().backward()
    assert (forward.count, backward.count) == (3, 2)


class _Exchanges(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).startswith("c10d.alltoall")
        return function(*args, **kwargs or {})


def some_need_gradients(mesh: DeviceMesh) -> None:
    """A process whose tokens need none takes part all the same, where another's do; where none do, nobody does."""
    mine, nothing = dist.get_rank() == 0, (False, False)
    for needed in ((True, True), (True, False), (False, True)):
        call = _call(mesh, needed=needed if mine else nothing)
        assert call.found.requires_grad
        if mine:
            _assert_equal_gradients(call, rtol=1e-5, atol=1e-6)
        else:
            call.found.sum().backward()
            assert all(tensor.grad is None for tensor in call.inputs)
    assert not _call(mesh, needed=nothing).found.requires_grad
    with torch.no_grad():
        assert not _call(mesh).found.requires_grad


def differentiated_twice(mesh: DeviceMesh) -> None:
    call = _call(mesh)
    seconds = []
    for result in (call.found, call.expected):
        first = torch.autograd.grad(result.square().sum(), call.inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(one.square().sum() for one in first), call.inputs))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def checkpointed(mesh: DeviceMesh) -> None:
    one_step(mesh, "qwen3_moe", after=lambda model: model.gradient_checkpointing_enable())


def copied(mesh: DeviceMesh) -> None:
    """A deep copy is as spread as the original, on the same processes."""
    model = apply_expert_parallel(_build("qwen3_moe"), mesh)
    twin, inputs = copy.deepcopy(model), _mine(_batch("qwen3_moe"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    expected, found = _build("qwen3_moe").state_dict(), gather_state_dict(twin)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    torch.testing.assert_close(_mean(_loss(twin, inputs)), _mean(_loss(_build("qwen3_moe"), inputs)))


def compiled(mesh: DeviceMesh) -> None:
    """The experts themselves, that is: no compiler gets hold of an exchange."""
    model = apply_expert_parallel(_build("qwen3_moe"), mesh)
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    module = next(module for module in model.modules() if is_experts(module))
    x = torch.randn(5, module.gate_up_proj.shape[2], requires_grad=True)  # type: ignore[union-attr,index]
    index, weights = torch.arange(10).view(5, 2) % 4, torch.rand(5, 2)
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    expected = module(x, index, weights)
    found = torch.compile(module, backend=note)(x, index, weights)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(result.square().sum(), x) for result in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert any("silu" in name or "mm" in name for name in called), called
    assert not any("all_to_all" in name or "wait_tensor" in name for name in called), called


def trained(mesh: DeviceMesh) -> None:
    """Twenty steps with momentum."""
    single, shared = _build("qwen3_moe"), _build("qwen3_moe")
    apply_expert_parallel(shared, mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9) for model in (single, shared)]
    for step in range(20):
        inputs = _batch("qwen3_moe", seed=step % 3)
        expected = _loss(single, inputs)
        expected.backward()
        found = _loss(shared, _mine(inputs))
        found.backward()
        torch.testing.assert_close(_mean(found), expected.detach(), rtol=1e-4, atol=1e-5)
        gradients = _gradients(shared)
        for name, parameter in shared.named_parameters():
            whole = gradients[name]
            is_part = whole.shape != parameter.shape
            parameter.grad = whole.chunk(dist.get_world_size())[dist.get_rank()].clone() if is_part else whole
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = gather_state_dict(shared)
    assert expected < 5.0, "it learns"
    for name, tensor in single.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-5)


def saved_and_loaded(mesh: DeviceMesh) -> None:
    """The format is a single process's, both ways."""
    single, shared = _build("gpt_oss"), _build("gpt_oss")
    apply_expert_parallel(shared, mesh)
    state = gather_state_dict(shared)
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in single.state_dict().items()
    }
    other = presets.build("gpt_oss", seed=5)
    load_state_dict(shared, other.state_dict())
    assert all(torch.equal(gather_state_dict(shared)[name], tensor) for name, tensor in other.state_dict().items())
    inputs = presets.inputs(other)
    with torch.no_grad():
        torch.testing.assert_close(shared.eval()(**inputs).logits, other(**inputs).logits)


def refused(mesh: DeviceMesh) -> None:
    """Nothing is changed by a call that can't be served."""

    def error_of(model: nn.Module, **options: Any) -> str:
        before = {name: parameter.shape for name, parameter in model.named_parameters()}
        try:
            apply_expert_parallel(model, options.pop("mesh", mesh), **options)
        except ValueError as error:
            assert before == {name: parameter.shape for name, parameter in model.named_parameters()}
            return str(error)
        raise AssertionError("no error")

    world = dist.get_world_size()
    assert "no dimension 'tp'; its dimensions: ('ep',)" in error_of(_build("qwen3_moe"), dim="tp")
    assert "its dimensions: unnamed" in error_of(_build("qwen3_moe"), mesh=init_device_mesh("cpu", (world,)))
    assert "has no experts to share" in error_of(_build("qwen3"))
    assert f"3 experts can't be shared among {world} processes" in error_of(presets.build("qwen3_moe", num_experts=3))
    model = apply_expert_parallel(_build("qwen3_moe"), mesh)
    assert "are shared among processes already" in error_of(model)


CASES: dict[str, Callable[[DeviceMesh], None]] = {
    f"one step of {name}": functools.partial(one_step, name=name)
    for name in ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe")
} | {
    "processes without tokens": functools.partial(one_step, name="qwen3_moe", change=_to_the_first_experts),
    "kernels first": functools.partial(kernels, first=True),
    "kernels last": functools.partial(kernels, first=False),
    "called by name": called_by_name,
    "sent once": sent_once,
    "any dtypes": any_dtypes,
    "three exchanges": three_exchanges,
    "some need gradients": some_need_gradients,
    "differentiated twice": differentiated_twice,
    "checkpointed": checkpointed,
    "copied": copied,
    "compiled": compiled,
    "trained": trained,
    "saved and loaded": saved_and_loaded,
    "refused": refused,
}

INTERPRETED = {
    name: CASES[name]
    for name in ("sent once", "any dtypes", "one step of qwen3_moe", "processes without tokens", "differentiated twice")
}
"""Those in which Triton's programs sort and add up rows, where they are interpreted. A process has its own."""
