"""Broken backends and installers: the model stays as it was, or what stays is said; the report names the culprit."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.fragile import (
    NORM,
    ROPE,
    TOYS,
    Doubled,
    Raising,
    boom,
    fragile,
    here,
    interrupt,
    loads,
    loopback,
    patching,
    register,
)
from tests.support.snapshots import bits, differences, state_of
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.install import default_installer
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import report
from twinkle.kernel.undo import kernelized, patch, unkernelize
from twinkle.reasons import Reason

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")

# --- before anything is installed -----------------------------------------------------------------------------------

REFUSED = Reason("tiny", "too tiny", "make it larger")


@pytest.mark.parametrize(
    ("backend", "state", "words"),
    [
        (KernelImpl(boom, boom), "kept", "bad: available() raised RuntimeError: boom"),
        (KernelImpl(boom, lambda: (False, "driver 1 found, 2 wanted")), "kept", "bad: driver 1 found, 2 wanted"),
        (KernelImpl(boom, lambda: None), "kept", "bad: available() returned None"),  # type: ignore[arg-type,return-value]
        (KernelImpl(boom, here), "kept", "bad: load() raised RuntimeError: boom"),
        (KernelImpl(loads(None), here), "kept", "bad: load() returned None"),
        (KernelImpl(boom, here, boom), "refused", "bad: accepts() raised RuntimeError: boom"),
        (KernelImpl(boom, here, lambda site: REFUSED), "refused", "bad: too tiny (make it larger)"),
        (KernelImpl(boom, here, lambda site: "no"), "refused", "bad: no"),
        (KernelImpl(boom, here, lambda site: False), "refused", "accepts() returned False, not None or a reason"),
        (KernelImpl(boom, here, lambda site: True), "refused", "accepts() returned True, not None or a reason"),
        (KernelImpl(loads(boom), here), "refused", "the kernel takes 'self' only by position"),
        (KernelImpl(loads(3), here), "refused", "builtins.int is a int, the target is a method"),
        (KernelImpl(loads(Doubled()), here), "refused", "Doubled is a Doubled, the target is a method"),
        (KernelImpl(loads(dict), here), "refused", "builtins.dict is a class but no nn.Module"),
    ],
)
def test_a_backend_that_cannot_be_had_is_a_reason_and_the_next_serves(
    model: toys.ToyModel, other: toys.ToyModel, backend: KernelImpl, state: str, words: str
) -> None:
    register(backend)
    before = state_of(model)
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert (row.state, row.instances, row.backend) == (state, 4, None) and words in row.why(), row.why()
    assert differences(before, state_of(model)) == []

    kernelize(model, {NORM: fragile("bad", "good")})
    (row,) = report(model).rows
    assert (row.state, row.instances, row.backend) == ("installed", 4, "good") and words in row.why()
    assert [tried.backend for tried in row.tried] == ["bad", "good"]


@pytest.mark.parametrize("where", ["available", "accepts", "load"])
def test_an_interrupt_while_planning_leaves_nothing(model: toys.ToyModel, other: toys.ToyModel, where: str) -> None:
    register(KernelImpl(**{"load": loads(Doubled), "available": here, where: interrupt}))
    with pytest.raises(KeyboardInterrupt):
        kernelize(model, {toys.ToyNorm: loopback("rms_norm"), f"{TOYS}.ToyMLP.forward": fragile()})
    assert report(model).rows == []


def test_what_is_known_of_a_backend_is_asked_once(model: toys.ToyModel) -> None:
    asked: dict[str, int] = {"available": 0, "load": 0}

    def available() -> tuple[bool, None]:
        asked["available"] += 1
        return True, None

    def load(target: Any) -> Any:
        asked["load"] += 1
        return Doubled

    register(KernelImpl(load, available))
    kernelize(model, {NORM: fragile(), f"{TOYS}.ToyMLP.forward": fragile(), f"{TOYS}.OddNorm": fragile()})
    assert asked == {"available": 1, "load": 3}, "one question for all, one load for each target's class"


def test_an_op_whose_reference_is_broken(model: toys.ToyModel) -> None:
    backend = KernelImpl(boom, here)
    register_op("fragile", implementations={"bad": backend}, reference="no_such_module.reference")
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert row.state == "refused" and "importing the reference of op fragile raised ModuleNotFoundError" in row.why()
    # Nor does it stand in the way of entries without an op, which are compared with whatever knows their inputs.
    kernelize(model, {NORM: Doubled})
    assert report(model).rows[0].state == "installed"


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (boom, "probing ToyNorm.forward raised RuntimeError: boom"),
        (lambda site: [1], "probing ToyNorm.forward raised TypeError: unhashable type"),
        (lambda site: Reason("not-this-op", "something else"), "something else"),
    ],
)
def test_an_op_whose_probe_is_broken(
    model: toys.ToyModel, monkeypatch: pytest.MonkeyPatch, probe: Any, words: str
) -> None:
    reference = types.ModuleType("fragile_reference")
    reference.probe = probe  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "fragile_reference", reference)
    register_op("fragile", implementations={"bad": KernelImpl(boom, here)}, reference="fragile_reference")
    kernelize(model, {NORM: fragile()})
    (row,) = report(model).rows
    assert row.state == "refused" and words in row.why() and row.why().count(words) == 1


# --- while it is installed ------------------------------------------------------------------------------------------


def process_wide_only(model: nn.Module, target: Any, impl: Any) -> int:
    patch(toys, "turn", lambda x: x)
    patch(nn.functional, "silu", lambda x: x)
    raise RuntimeError("out of luck")


def default_then_boom(model: nn.Module, target: Any, impl: Any) -> int:
    assert default_installer(model, target, impl) == 4
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_installer_that_fails_is_taken_back_and_so_is_all_else(
    model: toys.ToyModel, other: toys.ToyModel, at: int, error: BaseException
) -> None:
    register(KernelImpl(loads(Doubled), here))
    before, output = state_of(model), bits(model, toys.toy_input())
    mapping = {
        f"{TOYS}.ToyMLP.forward": loopback("swiglu"),
        ROPE: loopback("rotary"),
        NORM: fragile(installer=patching(at, error)),
    }
    with pytest.raises(type(error)) as raised:
        kernelize(model, mapping)
    assert raised.value is error
    assert [note for note in getattr(error, "__notes__", []) if "could not" in note] == []
    assert differences(before, state_of(model)) == []
    assert torch.equal(bits(model, toys.toy_input()), output)
    (row,) = report(model).rows
    assert (row.target, row.state, row.backend) == (NORM, "failed", None)
    assert f"install raised {type(error).__name__}" in row.why() and "was taken back" in row.why()
    json.dumps(report(model).to_dict())
    # And after that it can be done right.
    kernelize(model, {**mapping, NORM: fragile("good")})
    assert [row.state for row in report(model).rows] == ["installed"] * 3


@pytest.mark.parametrize("installer", [process_wide_only, default_then_boom])
def test_other_ways_to_fail(model: toys.ToyModel, other: toys.ToyModel, installer: Any) -> None:
    register(KernelImpl(loads(Doubled), here), installer=installer)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="out of luck"):
        kernelize(model, {NORM: fragile()})
    assert differences(before, state_of(model)) == []
    assert f"{installer.__name__} raised RuntimeError: out of luck" in report(model).rows[0].why()


def test_a_failing_call_leaves_what_an_earlier_one_installed(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Doubled), here))
    kernelize(model, {NORM: loopback("rms_norm"), ROPE: loopback("rotary")})
    before, output, rows = state_of(model), bits(model, toys.toy_input()), report(model).rows
    with pytest.raises(RuntimeError):
        kernelize(model, {ROPE: loopback("rotary"), NORM: fragile(installer=patching(at=2))})
    assert differences(before, state_of(model)) == []
    assert torch.equal(bits(model, toys.toy_input()), output)
    now = report(model).rows
    earlier = [row.counts for row in rows]
    assert [row.counts for row in now if row.state == "installed"] == earlier, "what still serves is still told"
    assert [row.state for row in now if row.counts not in earlier] == ["failed"]


def test_the_error_says_what_was_changed_behind_our_back(model: toys.ToyModel) -> None:
    def outside(model: nn.Module) -> None:
        model.layers[0].marker = 1
        toys.ToyMLP.forward = lambda self, x: x  # type: ignore[method-assign,assignment]
        toys.turn = lambda x: x
        model.layers[1].mlp.__class__ = type("Sub", (toys.ToyMLP,), {})

    originals = toys.ToyMLP.forward, toys.turn
    register(KernelImpl(loads(Doubled), here))
    try:
        with pytest.raises(RuntimeError, match="out of luck") as raised:
            kernelize(model, {NORM: fragile(installer=patching(at=2, outside=outside))})
        notes = "\n".join(raised.value.__notes__)
        for where in ("layers.0.marker", f"{TOYS}.ToyMLP.forward", "layers.1.mlp.__class__", f"{TOYS}.turn"):
            assert where in notes, f"{where} is not in {notes}"
        why = report(model).rows[0].why()
        assert "could not take back" in why and "layers.0.marker" in why
    finally:
        del model.layers[0].marker
        model.layers[1].mlp.__class__ = toys.ToyMLP
        toys.ToyMLP.forward, toys.turn = originals  # type: ignore[method-assign]


# --- when it is called ----------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_when_it_is_called_is_named(model: toys.ToyModel) -> None:
    register(KernelImpl(loads(Raising), here))
    output = bits(model, toys.toy_input())
    kernelize(model, {NORM: fragile()})
    with pytest.raises(RuntimeError, match="no kernel image is available") as raised:
        model(toys.toy_input())
    (note,) = raised.value.__notes__
    assert "Raising" in note and "ToyNorm.forward" in note and "unkernelize(model)" in note
    (row,) = report(model).rows
    assert (row.calls, row.errors) == (0, 1) and row.to_dict()["errors"] == 1
    assert "raised in 1 call" in report(model).table()
    unkernelize(model)
    assert torch.equal(bits(model, toys.toy_input()), output)


def test_a_function_that_fails_when_it_is_called_is_named(model: toys.ToyModel) -> None:
    def rope(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        raise RuntimeError("no kernel image is available")

    register_op("fragile", implementations={"bad": KernelImpl(loads(rope), here)})
    kernelize(model, {ROPE: fragile()})
    with pytest.raises(RuntimeError) as raised:
        model(toys.toy_input())
    assert "rope" in raised.value.__notes__[0] and report(model).rows[0].errors == 1


def test_a_function_that_calls_itself_by_the_originals_name(model: toys.ToyModel) -> None:
    """The natural way to wrap it; one note says what to do, however deep it went."""

    def rope(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return toys.apply_rope(q, k, cos, sin, unsqueeze_dim)

    kernelize(model, {ROPE: rope})
    with pytest.raises(RecursionError) as raised:
        model(toys.toy_input())
    (note,) = raised.value.__notes__
    assert "installed in the place of apply_rope" in note and "keep the original first" in note
    assert report(model).rows[0].errors > 1


@pytest.mark.parametrize(
    ("answer", "words"), [(boom, "accepts_call() raised RuntimeError: boom"), (lambda *args: False, "False")]
)
def test_a_call_that_the_kernel_cannot_judge_is_the_originals(model: toys.ToyModel, answer: Any, words: str) -> None:
    kernel = type("Guarded", (Raising,), {"accepts_call": staticmethod(answer)})
    register(KernelImpl(loads(kernel), here))
    output = bits(model, toys.toy_input())
    kernelize(model, {NORM: fragile()})
    assert torch.equal(bits(model, toys.toy_input()), output)
    (row,) = report(model).rows
    assert (row.calls, row.errors, row.fallbacks) == (0, 0, {words: 4})
    json.dumps(report(model).to_dict())
    with pytest.raises(TypeError, match="forward"):  # what is no call at all is told in the original's words
        model.layers[0].norm1()


def test_how_checkpointing_stops_is_no_error() -> None:
    from torch.utils.checkpoint import checkpoint

    model = toys.toy().train()
    kernelize(model, {toys.ToyNorm: loopback("rms_norm"), f"{TOYS}.ToyMLP.forward": loopback("swiglu")})
    x = toys.toy_input().requires_grad_()
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    assert [(row.errors, row.state) for row in report(model).rows] == [(0, "installed")] * 2
    assert min(row.calls for row in report(model).rows) >= 4
    unkernelize(model)


# --- real models ----------------------------------------------------------------------------------------------------


def test_a_broken_third_party_op_beside_the_default_mapping(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's broken backend in one entry costs that entry only."""
    register(KernelImpl(boom, boom))
    qwen3 = presets.build("qwen3")
    before, output = state_of(qwen3), bits(qwen3, **presets.inputs(qwen3))
    mapping = {
        modeling_qwen3.Qwen3RMSNorm: fragile(),
        "transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward": loopback("swiglu"),
        "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb": loopback("rotary"),
    }
    with kernelized(qwen3, mapping):
        assert [row.state for row in report(qwen3).rows] == ["kept", "installed", "installed"]
        bits(qwen3, **presets.inputs(qwen3))
        assert [row.calls > 0 for row in report(qwen3).rows] == [False, True, True]
    assert differences(before, state_of(qwen3)) == []
    assert torch.equal(bits(qwen3, **presets.inputs(qwen3)), output)
