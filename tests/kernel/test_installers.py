"""What a custom installer returns and writes: counted, reported, undone; what it writes elsewhere is told."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support import toys
from tests.support.fragile import (
    NORM,
    ROPE,
    Doubled,
    boom,
    fragile,
    here,
    loads,
    loopback,
    norms,
    patching,
    register,
)
from tests.support.snapshots import bits, differences, state_of
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.install import default_installer, patch_function
from twinkle.kernel.journal import Refused
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import patch, patch_method, unkernelize

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")


def test_a_custom_installer_is_counted_reported_and_undone(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=patching())
    before, output = state_of(model), bits(model, toys.toy_input())
    planned = plan(model, {NORM: fragile()}).rows[0]
    assert (planned.state, planned.installer) == ("installed", "install")
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert (row.state, row.backend, row.installer, row.instances) == ("installed", "bad", "install", 4)
    assert row.scope == "process", "it patched a Python module, which all models share"
    assert not torch.equal(bits(model, toys.toy_input()), output)
    undone = unkernelize(model)
    assert undone.patches == 5 and undone.not_undone == ()
    assert differences(before, state_of(model)) == []


def test_the_mappings_installer_comes_before_the_ops(model: toys.ToyModel) -> None:
    called = []

    def mine(model: nn.Module, target: Any, impl: Any) -> int:
        called.append((model, target, impl))
        return default_installer(model, target, impl)

    register(KernelImpl(loads(Doubled), here), installer=boom)
    kernelize(model, {toys.ToyNorm: fragile(installer=mine)})
    assert called == [(model, toys.ToyNorm, Doubled)], "it gets the key as it was written"
    (row,) = report(model).rows
    assert (row.state, row.installer, row.instances, row.scope) == ("installed", "mine", 4, "model")


@pytest.mark.parametrize(
    ("returned", "state", "instances", "words"),
    [
        (None, "installed", None, ""),
        (1, "installed", 1, ""),
        (0, "refused", 0, "the installer found no site in this model"),
    ],
)
def test_what_an_installer_returns(
    model: toys.ToyModel, caplog: pytest.LogCaptureFixture, returned: Any, state: str, instances: Any, words: str
) -> None:
    def install(model: nn.Module, target: Any, impl: Any) -> Any:
        patch(norms(model)[0], "forward", types.MethodType(impl.forward, norms(model)[0]))
        return returned

    register(KernelImpl(loads(Doubled), here), installer=install)
    before = state_of(model)
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert (row.state, row.instances) == (state, instances) and words in row.why()
    assert ("?" in report(model).table()) is (instances is None)
    if state == "refused":
        assert differences(before, state_of(model)) == [], "what it had written all the same is taken back"
        assert row.backend is None and any(words in record.getMessage() for record in caplog.records)
        with pytest.raises(ValueError, match=f"strict: {NORM} is not installed: refused: .*{words}"):
            kernelize(model, {NORM: fragile()}, strict=True)
        assert differences(before, state_of(model)) == []


def test_an_installer_that_does_nothing_and_says_nothing(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=lambda model, target, impl: None)
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert row.state == "refused" and "the installer changed nothing" in row.why()


# --- methods of single modules ----------------------------------------------------------------------------------------


def doubling(model: nn.Module, target: Any, impl: Any) -> int:
    """An installer that replaces the method of the first norm."""

    def make(original: Any) -> Any:
        return lambda self, x: 2 * original(self, x)

    patch_method(norms(model)[0], "forward", make)
    return 1


def test_a_method_of_one_module_is_replaced_copied_and_undone(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=doubling)
    before = state_of(model)
    x = toys.toy_input()
    expected = 2 * norms(model)[0](x)
    kernelize(model, {"all": fragile()})
    (row,) = report(model).rows
    assert (row.state, row.instances, row.scope) == ("installed", 1, "process")
    twin = copy.deepcopy(model)
    assert torch.equal(norms(model)[0](x), expected) and torch.equal(norms(twin)[0](x), expected)
    assert unkernelize(model).modules == 1 and differences(before, state_of(model)) == []
    assert torch.equal(norms(twin)[0](x), expected)
    assert unkernelize(twin).modules == 1 and torch.equal(norms(twin)[0](x), expected / 2)


def test_the_same_again_is_left_alone_and_another_backend_takes_its_place(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=doubling)
    x = toys.toy_input()
    expected = 2 * norms(model)[0](x)
    for _ in range(2):
        kernelize(model, {"all": fragile()})
        assert torch.equal(norms(model)[0](x), expected)
    first = type(norms(model)[0])
    kernelize(model, {"all": fragile("good")})
    assert type(norms(model)[0]) is not first and torch.equal(norms(model)[0](x), expected), "once doubled, not twice"
    kernelize(model, {"all": fragile("npu")})
    assert torch.equal(norms(model)[0](x), expected / 2), "no backend: what an earlier call installed is taken off"
    unkernelize(model)


def test_where_another_entrys_kernel_is(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=doubling)
    kernelize(model, {NORM: KernelChoice("rms_norm", ("loopback",)), "all": fragile()})
    norm, all_ = report(model).rows
    assert (norm.state, norm.instances, all_.state) == ("installed", 4, "refused")
    assert f"ToyNorm.forward already carries the kernel of {NORM}" in all_.why()
    unkernelize(model)


def test_an_installer_may_refuse_and_say_why(model: toys.ToyModel) -> None:
    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch_method(norms(model)[0], "forward", lambda original: original)
        raise Refused("the moon is not full")

    register(KernelImpl(loads(Doubled), here), installer=install)
    before = state_of(model)
    kernelize(model, {"all": fragile()})
    (row,) = report(model).rows
    assert (row.state, row.instances) == ("refused", 0) and "the moon is not full" in row.why()
    unkernelize(model)
    assert differences(before, state_of(model)) == []


def test_patch_method_outside_an_installer(model: toys.ToyModel) -> None:
    with pytest.raises(RuntimeError, match="for installers"):
        patch_method(norms(model)[0], "forward", lambda original: original)


@pytest.mark.parametrize("returned", ["4", -1, 2.0, True, [1]])
def test_an_installer_that_returns_rubbish(model: toys.ToyModel, returned: Any) -> None:
    def install(model: nn.Module, target: Any, impl: Any) -> Any:
        patch(norms(model)[0], "forward", types.MethodType(impl.forward, norms(model)[0]))
        return returned

    register(KernelImpl(loads(Doubled), here), installer=install)
    before = state_of(model)
    with pytest.raises(TypeError, match=r"install returned .*, not how many sites it changed \(or None\)"):
        kernelize(model, {NORM: fragile()})
    assert differences(before, state_of(model)) == []


OUTSIDE: dict[str, Callable[[nn.Module], Callable[[], None]]] = {}
"""What an installer may change without patch(): where it shows in the report -> changes it and gives the way back."""


def outside(where: str) -> Callable[[Callable[[nn.Module], Callable[[], None]]], Any]:
    return lambda change: OUTSIDE.setdefault(where, change)


def _set(holder: Any, name: str, value: Any) -> Callable[[], None]:
    absent = name not in vars(holder)
    old = vars(holder).get(name)
    setattr(holder, name, value)
    return lambda: delattr(holder, name) if absent else setattr(holder, name, old)


@outside("layers.0.norm1.forward")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(norms(model)[0], "forward", lambda x: x)


@outside("layers.0.norm1.__class__")
def _(model: nn.Module) -> Callable[[], None]:
    module = norms(model)[0]
    module.__class__ = toys.OverridingNorm
    return lambda: setattr(module, "__class__", toys.ToyNorm)


@outside("layers.0.norm1.eps")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(norms(model)[0], "eps", 1.0)


@outside("layers.0.norm1.scale")
def _(model: nn.Module) -> Callable[[], None]:
    module, old = norms(model)[0], norms(model)[0].scale
    module.scale = nn.Parameter(torch.ones(toys.HIDDEN))
    return lambda: setattr(module, "scale", old)


@outside("layers.1.norm2")
def _(model: nn.Module) -> Callable[[], None]:
    old = model.layers[1].norm2
    model.layers[1].norm2 = nn.Identity()
    return lambda: setattr(model.layers[1], "norm2", old)


@outside("ToyNorm.forward")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(toys.ToyNorm, "forward", lambda self, x: x)


@outside("ToyNorm.helper")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(toys.ToyNorm, "helper", lambda self: None)


@outside("tests.support.toys.apply_rope")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(toys, "apply_rope", lambda *args: args[:2])


@outside("torch.nn.LayerNorm")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(nn, "LayerNorm", nn.Identity)


@outside("torch.nn.functional.silu")
def _(model: nn.Module) -> Callable[[], None]:
    return _set(nn.functional, "silu", lambda x: x)


@pytest.mark.parametrize("where", OUTSIDE)
def test_what_is_written_outside_patch_is_told(
    model: toys.ToyModel, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    back = []

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch(norms(model)[2], "forward", types.MethodType(impl.forward, norms(model)[2]))
        back.append(OUTSIDE[where](model))
        return 1

    register(KernelImpl(loads(Doubled), here), installer=install)
    try:
        kernelize(model, {NORM: fragile()})
        (row,) = report(model).rows
        told = [note for note in row.notes if "changed outside patch(), so that undo won't bring it back" in note]
        assert row.state == "installed" and len(told) == 1 and where in told[0], row.notes
        assert told[0].count(",") <= 1, "what was journalled is not told"
        assert any(where in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        unkernelize(model)
    finally:
        back[0]()


@pytest.mark.parametrize("write", [patch, patch_function])
def test_patches_are_for_installers(write: Callable[..., None]) -> None:
    words = rf"{write.__name__}\(\) was called outside kernelize\(\); it is for installers, which kernelize\(\) runs"
    with pytest.raises(RuntimeError, match=words):
        write(toys, "turn", lambda x: x)
    assert toys.turn.__name__ == "turn"


# --- functions of the whole process -----------------------------------------------------------------------------------


@pytest.fixture
def home() -> types.ModuleType:
    """A Python module with a function that no model's code calls."""
    made = types.ModuleType("home")
    made.turn = lambda x: -x  # type: ignore[attr-defined]
    return made


@pytest.fixture
def table() -> dict[str, Any]:
    """The same as a mapping, as libraries have them."""
    return {"turn": lambda x: -x}


@pytest.fixture
def turning(home: types.ModuleType, table: dict[str, Any]) -> Callable[[str], Any]:
    """The mapping for one of two backends, which replace both functions."""

    def load(factor: int) -> Callable[..., Any]:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return factor * x

        kernel.accepts_call = lambda x: None if x.dim() == 1 else "not a row"  # type: ignore[attr-defined]
        return kernel

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch_function(home, "turn", impl)
        patch_function(table, "turn", impl)
        return 2

    kernels = {"good": load(10), "bad": load(20)}
    implementations = {name: KernelImpl(loads(kernel), here) for name, kernel in kernels.items()}
    register_op("turning", implementations=implementations, installer=install)
    return lambda backend: {"turning": KernelChoice("turning", (backend,))}


def test_a_function_is_replaced_in_two_places_that_count_together(
    model: toys.ToyModel, home: Any, table: dict[str, Any], turning: Callable[[str], Any]
) -> None:
    originals, rows = (home.turn, table["turn"]), torch.ones(2, 6)
    kernelize(model, turning("good"))
    (row,) = report(model).rows
    assert (row.state, row.scope, row.instances) == ("installed", "process", 2)
    assert torch.equal(home.turn(rows[0]), 10 * rows[0]) and torch.equal(table["turn"](rows[0]), 10 * rows[0])
    assert torch.equal(table["turn"](rows), -rows), "a call that the kernel refuses goes to what was there"
    (row,) = report(model).rows
    assert (row.calls, row.fallbacks) == (2, {"not a row": 1})
    assert unkernelize(model).patches == 2 and (home.turn, table["turn"]) == originals


def test_models_share_a_replaced_function_and_its_counts(
    model: toys.ToyModel, home: Any, table: dict[str, Any], turning: Callable[[str], Any]
) -> None:
    second, third, original = toys.toy(seed=4), toys.toy(seed=5), table["turn"]
    for made in (model, second):
        kernelize(made, turning("good"))
    held = table["turn"]
    held(torch.ones(6))
    assert report(model).rows[0].calls == report(second).rows[0].calls == 1
    kernelize(third, turning("bad"))
    (row,) = report(third).rows
    assert row.state == "refused" and "home.turn already carries another kernel" in row.why()
    unkernelize(model)
    assert table["turn"] is held, "the second model still claims it"
    unkernelize(second)
    assert table["turn"] is original and torch.equal(held(torch.ones(6)), -torch.ones(6))


def test_a_function_that_is_not_there(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here), installer=lambda *_: patch_function(toys, "turm", torch.neg))
    with pytest.raises(AttributeError, match=r"support\.toys\.turm doesn't exist, so a kernel can't take its place"):
        kernelize(model, {"all": fragile()})
    assert not hasattr(toys, "turm") and report(model).rows[0].state == "failed"


def test_a_custom_installer_may_be_run_again(model: toys.ToyModel) -> None:
    """A later call undoes first what the earlier one did, whatever the loader gives."""
    runs = []

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        runs.append(impl)
        for module in norms(model):
            patch(module, "forward", types.MethodType(impl.forward, module))
        return 4

    register(KernelImpl(lambda target: type("Fresh", (Doubled,), {}), here), installer=install)
    kernelize(model, {NORM: fragile()})
    (first,) = report(model).rows
    kernelize(model, {NORM: fragile()})
    (again,) = report(model).rows
    assert len(runs) == 1 and again.counts is first.counts, "the same again is left alone"
    kernelize(model, {NORM: fragile("good")})
    (row,) = report(model).rows
    assert len(runs) == 2 and (row.state, row.backend, row.instances) == ("installed", "good", 4), row.why()
    kernelize(model, {NORM: loopback("rms_norm")})
    (row,) = report(model).rows
    assert (row.state, row.backend, row.installer) == ("installed", "loopback", "default_installer"), row.why()
    assert not any("forward" in vars(module) for module in norms(model))


def test_a_logical_name(model: toys.ToyModel, other: toys.ToyModel) -> None:
    """Its installer finds the places; two models may share one patch, and not two."""

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch(toys, "turn", impl)
        return 2

    kernels = {"good": lambda x: 0 * x, "bad": lambda x: 2 * x}
    implementations = {name: KernelImpl(loads(kernel), here) for name, kernel in kernels.items()}
    register_op("turning", implementations=implementations, installer=install)
    good, bad = ({"turning": KernelChoice("turning", (name,))} for name in kernels)
    original, third = toys.turn, toys.toy(seed=5)
    assert plan(model, good).rows[0].instances is None
    kernelize(model, good)
    (row,) = report(model).rows
    assert (row.state, row.scope, row.instances, row.backend) == ("installed", "process", 2, "good")
    kernelize(third, good)
    assert report(third).rows[0].state == "installed"
    kernelize(third, bad)
    (row,) = report(third).rows
    assert row.state == "refused" and "turn already carries another kernel" in row.why()
    unkernelize(model)
    assert toys.turn is kernels["good"] or toys.turn is original
    kernelize(third, bad)
    assert report(third).rows[0].state == "installed" and toys.turn is kernels["bad"]
    kernelize(third, good)
    assert report(third).rows[0].state == "installed" and toys.turn is kernels["good"]
    unkernelize(third)
    assert toys.turn is original


def test_two_models_may_share_what_a_custom_installer_put_in_place_of_a_function(model: toys.ToyModel) -> None:
    def mine(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return q, k

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch(toys, "apply_rope", impl)
        return 1

    original, second = toys.apply_rope, toys.toy(seed=4)
    implementations = {"good": KernelImpl(loads(mine), here), "bad": KernelImpl(loads(lambda *a, **k: a), here)}
    register_op("rope", implementations=implementations, installer=install)
    for made in (model, second):
        kernelize(made, {ROPE: KernelChoice("rope", ("good",))})
        assert report(made).rows[0].state == "installed", report(made).rows[0].why()
    assert toys.apply_rope is mine
    kernelize(second, {ROPE: KernelChoice("rope", ("bad",))})
    (row,) = report(second).rows
    assert row.state == "refused" and "already serves another model with backend good" in row.why()
    unkernelize(model)
    kernelize(second, {ROPE: KernelChoice("rope", ("bad",))})
    assert report(second).rows[0].backend == "bad" and toys.apply_rope is not mine
    unkernelize(second)
    assert toys.apply_rope is original


@pytest.mark.parametrize("later", ["loopback", "inductor", "nobodys"])
def test_what_somebody_else_put_on_top_is_not_written_over(
    model: toys.ToyModel, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    def theirs(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return q, k

    kernelize(model, {ROPE: loopback("rotary")})
    ours = toys.apply_rope
    monkeypatch.setattr(toys, "apply_rope", theirs)
    kernelize(model, {ROPE: KernelChoice("rotary", (later,))})
    assert toys.apply_rope is theirs
    (row,) = report(model).rows
    assert row.state == ("kept" if later == "nobodys" else "refused"), "also where the same is asked for again"
    assert "apply_rope was replaced by somebody else since" in row.why()
    monkeypatch.setattr(toys, "apply_rope", ours)  # they take theirs off again, so that the undo finds ours
