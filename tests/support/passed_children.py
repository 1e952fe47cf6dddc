"""Modules with children that kernels go past, and all that somebody may hang on one, or make of it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules

from tests.support import lookalikes as like
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.report import Row, plan, report
from twinkle.kernel.undo import unkernelize


class SiLU(nn.Module):
    """An activation whose class is ours to patch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class GELU(nn.GELU):
    """The same; how exact is a setting."""


class Experts(like.Experts):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.act_fn = activation

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.act_fn(gate) * up


class MLP(like.MLP):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__(F.silu)
        self.act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(MLP):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__(activation)
        self.gate_up_proj = nn.Linear(like.WIDTH, 48)
        del self.gate_proj, self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


CASES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "swiglu": ("swiglu", lambda: MLP(SiLU())),
    "swiglu, fused projection": ("swiglu", lambda: FusedMLP(SiLU())),
    "swiglu, nested": ("swiglu", lambda: MLP(nn.Sequential(nn.Identity(), SiLU()))),
    "geglu": ("geglu", lambda: MLP(GELU("tanh"))),
    "experts": ("moe_experts", lambda: Experts(SiLU())),
}


def _inputs(module: nn.Module, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.linspace(-2, 2, 6 * like.WIDTH).view(6, like.WIDTH).to(device, dtype).requires_grad_()
    if not isinstance(module, Experts):
        return (x,)
    index = torch.tensor([[t % 4, (t + 1) % 4] for t in range(6)], device=device)
    return x, index, torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).to(device, dtype)


# --- what somebody does, with a module and the list in which it notes what it saw; gives the way back -----------------

Change = Callable[[Any, list[Any]], Callable[[], Any]]


def _leaf(module: Any) -> Any:
    return list(module.act_fn.modules())[-1]


def looks_only(module: Any, seen: list[Any]) -> Callable[[], Any]:
    return _leaf(module).register_forward_hook(lambda m, args, out: seen.append(out.shape)).remove  # type: ignore[no-any-return]


def hook(module: Any, seen: list[Any]) -> Callable[[], Any]:
    return _leaf(module).register_forward_hook(lambda m, args, out: (seen.append(1), 2 * out)[1]).remove  # type: ignore[no-any-return]


def hook_before(module: Any, seen: list[Any]) -> Callable[[], Any]:
    return _leaf(module).register_forward_pre_hook(lambda m, args: (seen.append(1), (2 * args[0],))[1]).remove  # type: ignore[no-any-return]


def backward_hook(module: Any, seen: list[Any]) -> Callable[[], Any]:
    called = lambda m, grads, _: (seen.append(1), (0 * grads[0],))[1]  # noqa: E731
    return _leaf(module).register_full_backward_hook(called).remove  # type: ignore[no-any-return]


def backward_hook_before(module: Any, seen: list[Any]) -> Callable[[], Any]:
    called = lambda m, grads: (seen.append(1), (0 * grads[0],))[1]  # noqa: E731
    return _leaf(module).register_full_backward_pre_hook(called).remove  # type: ignore[no-any-return]


def hook_for_all(module: Any, seen: list[Any]) -> Callable[[], Any]:
    def called(m: nn.Module, args: Any, out: Any) -> Any:
        if type(m) is type(_leaf(module)):
            seen.append(1)
            return 2 * out
        return None

    return torch_modules.register_module_forward_hook(called).remove


def backward_hook_for_all(module: Any, seen: list[Any]) -> Callable[[], Any]:
    def called(m: nn.Module, grads: Any, _: Any) -> Any:
        if type(m) is type(_leaf(module)):
            seen.append(1)
            return (0 * grads[0],)
        return None

    return torch_modules.register_module_full_backward_hook(called).remove


def forward_of_its_own(module: Any, seen: list[Any]) -> Callable[[], Any]:
    leaf = _leaf(module)
    leaf.forward = types.MethodType(lambda self, x: (seen.append(1), 2 * x)[1], leaf)
    return lambda: leaf.__dict__.pop("forward")


CHANGES: tuple[Change, ...] = (
    looks_only,
    hook,
    hook_before,
    backward_hook,
    backward_hook_before,
    hook_for_all,
    backward_hook_for_all,
    forward_of_its_own,
)
"""What may have been done before as well as after: the kernel fits the module, but not these calls."""


def another_module(module: Any, seen: list[Any]) -> Callable[[], Any]:
    before, module.act_fn = module.act_fn, nn.ReLU()
    return lambda: setattr(module, "act_fn", before)


def patched_class(module: Any, seen: list[Any]) -> Callable[[], Any]:
    cls: Any = type(_leaf(module))
    before, cls.forward = cls.forward, lambda self, x: 2 * x
    return lambda: setattr(cls, "forward", before)


def another_class(module: Any, seen: list[Any]) -> Callable[[], Any]:
    class Doubled(type(_leaf(module))):  # type: ignore[misc]
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    leaf = _leaf(module)
    before, leaf.__class__ = leaf.__class__, Doubled
    return lambda: setattr(leaf, "__class__", before)


def kernel_of_the_users_own(module: Any, seen: list[Any]) -> Callable[[], Any]:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    act_fn = module.act_fn if type(module.act_fn).__name__ != "Sequential" else module.act_fn[-1]
    kernelize(act_fn, {type(act_fn): Mine})
    return lambda: unkernelize(act_fn)


LATER: tuple[Change, ...] = (another_module, patched_class, another_class, kernel_of_the_users_own)
"""What makes the module another one: before, no kernel would fit."""


# --- the check --------------------------------------------------------------------------------------------------------


def _step(module: nn.Module, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    inputs = _inputs(module, device, dtype)
    out = module(*inputs)
    return out, *torch.autograd.grad(out.float().square().sum(), [inputs[0], *module.parameters()])


@contextlib.contextmanager
def undone(undo: Callable[[], Any]) -> Iterator[None]:
    try:
        yield
    finally:
        undo()


def assert_seen(
    case: str, backend: str, change: Change, before: bool, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """With a change, before or after, a kernelized module does what the original does; taken back, the kernel serves.

    Nobody's hook is run to find out whether the kernel fits.
    """
    op, make = CASES[case]
    torch.manual_seed(0)
    original, module = make().to(device, dtype), make().to(device, dtype)
    module.load_state_dict(original.state_dict())
    mapping: Any = {type(module): KernelChoice(op, (backend,))}
    theirs: list[Any] = []
    with undone(change(original, theirs)):
        expected = _step(original, device, dtype)
    seen: list[Any] = []
    undo = change(module, seen) if before else None
    try:
        plan(module, mapping)
        kernelize(module, mapping, strict=True, verify=True)
        assert seen == []
        undo = undo or change(module, seen)
        result = _step(module, device, dtype)
    finally:
        if undo is not None:
            undo()
    row: Row = report(module).rows[0]
    assert (row.calls, sum(row.fallbacks.values())) == (0, 1), row.fallbacks
    assert seen == theirs and all(map(torch.equal, result, expected))
    _step(module, device, dtype)
    assert report(module).rows[0].calls == 1, row.fallbacks
    unkernelize(module)
