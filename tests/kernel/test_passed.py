"""A kernel that goes past a child, an activation say, does so only as long as calling it would do nothing else."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

from tests.support import lookalikes as like
from tests.support.passed_children import CASES, CHANGES, LATER, MLP, Change, SiLU, assert_seen, hook
from twinkle.kernel import KernelChoice, conformance, kernelize, registry
from twinkle.kernel.passed import watched_at
from twinkle.kernel.probe import replaces
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.reasons import Reason

BACKENDS = [(case, backend) for case in CASES for backend in ("loopback", *(["torch"] if case == "experts" else []))]


def name(value: Any) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize(("case", "backend"), BACKENDS)
@pytest.mark.parametrize("change", [*CHANGES, *LATER], ids=name)
def test_what_is_done_to_a_child_that_no_kernel_calls(case: str, backend: str, change: Change) -> None:
    assert_seen(case, backend, change, before=False)
    if change in CHANGES:
        assert_seen(case, backend, change, before=True)


@pytest.mark.usefixtures("loopback")
def test_a_function_in_the_place_of_a_child() -> None:
    mlp, original, x = like.MLP(F.silu), like.MLP(F.relu), torch.randn(3, like.WIDTH)
    original.load_state_dict(mlp.state_dict())
    kernelize(mlp, {like.MLP: KernelChoice("swiglu", ("loopback",))}, strict=True)
    mlp._activation = F.relu
    assert torch.equal(mlp(x), original(x))
    (row,) = report(mlp).rows
    assert row.calls == 0 and list(row.fallbacks) == [
        "a function of it is not, or does not run, what was there when the kernel was installed"
    ]
    unkernelize(mlp)


@pytest.mark.usefixtures("loopback")
def test_its_classs_own_forward_bound_once_more_is_none_of_its_own() -> None:
    """As transformers' use_kernels binds it where it has no other."""
    mlp, x = MLP(SiLU()), torch.randn(3, like.WIDTH)
    kernelize(mlp, {MLP: KernelChoice("swiglu", ("loopback",))}, strict=True)
    mlp.act_fn.forward = types.MethodType(SiLU.forward, mlp.act_fn)  # type: ignore[method-assign]
    ours = mlp(x)
    assert report(mlp).rows[0].calls == 1
    torch.testing.assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), ours)
    unkernelize(mlp)


@pytest.mark.usefixtures("loopback")
def test_a_setting_of_a_child() -> None:
    mlp, x = MLP(nn.GELU()), torch.linspace(-3, 3, 2 * like.WIDTH).view(2, -1)
    kernelize(mlp, {MLP: KernelChoice("geglu", ("loopback",))}, strict=True)
    mlp.act_fn.approximate = "tanh"
    ours = mlp(x)
    assert report(mlp).rows[0].calls == 0
    unkernelize(mlp)
    assert torch.equal(ours, mlp(x))


@pytest.mark.usefixtures("loopback")
def test_a_copy_is_as_the_model_was() -> None:
    mlp, x = MLP(SiLU()), torch.randn(3, like.WIDTH)
    kernelize(mlp, {MLP: KernelChoice("swiglu", ("loopback",))}, strict=True)
    twin = copy.deepcopy(mlp)
    hook(twin, [])
    assert not torch.equal(mlp(x), twin(x))
    assert [report(m).rows[0].calls for m in (mlp, twin)] == [1, 1]  # one counter for both
    for module in (mlp, twin):
        unkernelize(module)


@pytest.mark.usefixtures("loopback")
def test_it_is_asked_in_compiled_code_too() -> None:
    x = torch.randn(3, like.WIDTH)
    for change in (None, hook):
        torch._dynamo.reset()
        mlp = MLP(SiLU())
        kernelize(mlp, {MLP: KernelChoice("swiglu", ("loopback",))}, strict=True)
        if change:
            change(mlp, [])
        ours = torch.compile(mlp, backend="eager", fullgraph=change is None)(x)
        unkernelize(mlp)
        torch.testing.assert_close(ours, mlp(x))


@pytest.mark.slow
def test_every_child_of_every_place_is_called_or_watched() -> None:
    """As the op's reference, which other kernels are like, says which it calls."""
    looked_at = set()
    for op in registry.ops():
        reference: Any = registry.reference_of(op)
        if reference is None or isinstance(reference, Reason) or replaces(reference) != "method":
            continue
        for place in conformance.places(op):
            site = place.site
            if site.module is None:
                continue
            called: set[str] = set()
            module = copy.deepcopy(reference.example(site, site.variant).module)
            for child_name, child in module.named_children():
                child.register_forward_hook(lambda *_, to=called, of=child_name: to.add(of))
            layer = reference.build(site.variant)
            layer.forward(module, *reference.example(site, site.variant).args)
            watched = {child_name for child_name, _ in watched_at(site, reference).children}
            assert called | watched == {n for n, c in site.module._modules.items() if c is not None}, site.name
            assert not called & watched, site.name
            looked_at |= {op} if watched else set()
    assert {"swiglu", "geglu", "moe_experts"} <= looked_at
