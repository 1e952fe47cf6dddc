"""Undoing kernels: twice, in any order, with somebody else's changes on top."""

from __future__ import annotations

import logging
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from tests.support.models import (
    clean_process,  # noqa: F401
    differences,
    installed,
    look,
    rows_of,
    same_bits,
    step,
)
from tests.support.qwen3 import QWEN3, kernelized_qwen3, loopback, qwen3
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.journal import patch_of
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import report
from twinkle.kernel.undo import kernelized, patch, unkernelize

HOME = sys.modules[Qwen3MLP.__module__]
MLP = f"{HOME.__name__}.Qwen3MLP.forward"


# --- undo -------------------------------------------------------------------------------------------------------------


def test_undo_twice():
    model = kernelized_qwen3()
    first, second = unkernelize(model), unkernelize(model)
    assert (first.modules, first.patches, first.not_undone) == (11, 1, ())
    assert (second.modules, second.patches, second.not_undone) == (0, 0, ())
    assert rows_of(model) == {} and unkernelize(nn.Linear(2, 2)).modules == 0


def test_what_a_later_call_took_off_is_not_undone_again(caplog):
    """Nobody else did anything; the later call refuses the sites of the earlier one, for good or until it fails."""
    model, target = qwen3(), next(key for key in loopback() if str(key).endswith("Qwen3RMSNorm"))
    before = look(model)
    kernelize(model, {target: KernelChoice("rms_norm", ("loopback",))})
    kernelize(model, {target: KernelChoice("rms_norm", ("refuse",))})
    assert differences(before, look(model)) == []
    assert unkernelize(model).not_undone == () and "somebody else" not in caplog.text
    # And one that takes them off, then fails: they are there again, and known.
    kernelize(model, {target: KernelChoice("rms_norm", ("loopback",))})

    def fails(model, target, impl):
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        kernelize(
            model,
            {target: KernelChoice("rms_norm", ("refuse",)), MLP: KernelChoice("swiglu", ("loopback",), fails)},
        )
    model.model.norm.__class__ = Qwen3RMSNorm  # now somebody else did something
    undone = unkernelize(model)
    assert (undone.modules, len(undone.not_undone)) == (8, 1)
    assert "model.norm: somebody else made it a Qwen3RMSNorm" in str(undone.not_undone[0])
    assert differences(before, look(model)) == []


def test_undo_in_the_other_order(rope):
    models = [qwen3() for _ in range(3)]
    looks = [look(model) for model in models]
    for model in models:
        kernelize(model, loopback())
    for model, others in ((models[1], 2), (models[2], 1), (models[0], 0)):
        assert HOME.apply_rotary_pos_emb is not rope
        undone = unkernelize(model)
        held = (f"{HOME.__name__}.apply_rotary_pos_emb",) if others else ()
        assert (undone.modules, undone.patches, undone.shared) == (11, 0 if others else 1, held)
    assert HOME.apply_rotary_pos_emb is rope
    assert [differences(*pair) for pair in zip(looks, map(look, models), strict=True)] == [[], [], []]


def test_kernelized_as_a_context():
    model = qwen3()
    before = look(model)
    with kernelized(model, loopback(), strict=True) as inside:
        assert inside is model and installed(model) == QWEN3
    assert differences(before, look(model)) == []
    with pytest.raises(ZeroDivisionError), kernelized(model, loopback()):
        raise ZeroDivisionError
    assert differences(before, look(model)) == []


def test_a_forward_put_on_an_instance_afterwards_is_named(caplog):
    model = kernelized_qwen3()
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    theirs = mlp.forward
    mlp.forward = lambda x: 2 * theirs(x)
    left = mlp.forward
    for _ in range(2):
        assert rows_of(model)["qwen3.Qwen3MLP.forward"].notes == [
            "1 of the modules have got a forward of their own since, which runs instead"
        ]
    assert rows_of(model)["qwen3.Qwen3RMSNorm"].notes == []
    with caplog.at_level(logging.WARNING, "twinkle.kernel"):
        undone = unkernelize(model)
    assert mlp.forward is left and type(mlp) is Qwen3MLP and type(norm) is Qwen3RMSNorm
    assert [reason.code for reason in undone.not_undone] == ["changed-since"]
    assert "model.layers.0.mlp: somebody else gave it a forward of its own" in str(undone.not_undone[0])
    assert "not undone: model.layers.0.mlp" in caplog.text


def test_a_class_put_on_an_instance_afterwards_is_left():
    model = kernelized_qwen3()
    derived, foreign = model.model.layers[0].mlp, model.model.layers[1].mlp
    derived.__class__ = type("Derived", (type(derived),), {})
    foreign.__class__ = type("Foreign", (Qwen3MLP,), {})
    classes = type(derived), type(foreign)
    undone = unkernelize(model)
    assert (type(derived), type(foreign)) == classes
    assert undone.modules == 9 and len(undone.not_undone) == 2
    assert "layers.0.mlp: the class is now Derived, which somebody else derived from ours" in str(undone.not_undone[0])
    assert "layers.1.mlp: somebody else made it a Foreign" in str(undone.not_undone[1])
    derived.__class__ = derived.__class__.__bases__[0]
    assert unkernelize(model).not_undone == () and type(derived) is Qwen3MLP


def test_a_method_put_on_our_class_afterwards_is_left():
    model = kernelized_qwen3()
    mlp = model.model.layers[0].mlp
    type(mlp).forward = lambda self, x: x
    undone = unkernelize(model)
    assert [r.code for r in undone.not_undone] == ["changed-since"] * 2
    assert "somebody else replaced forward on the generated" in str(undone.not_undone[0])
    assert mlp.forward(1) == 1


def test_a_method_put_on_the_original_class_afterwards_stays(monkeypatch):
    model = kernelized_qwen3()
    theirs = lambda self, x: x  # noqa: E731
    monkeypatch.setattr(Qwen3MLP, "forward", theirs)
    step(model)
    assert rows_of(model)["qwen3.Qwen3RMSNorm"].calls == 9
    assert unkernelize(model).not_undone == ()
    assert Qwen3MLP.forward is theirs and model.model.layers[0].mlp.forward(1) == 1


def test_a_function_put_there_afterwards_is_left(rope):
    model = kernelized_qwen3()
    ours = HOME.apply_rotary_pos_emb
    calls = []

    def theirs(*args, **kwargs):
        calls.append(args)
        return ours(*args, **kwargs)

    HOME.apply_rotary_pos_emb = theirs
    try:
        undone = unkernelize(model)
        assert HOME.apply_rotary_pos_emb is theirs and patch_of(HOME, "apply_rotary_pos_emb") is None
        assert [str(r) for r in undone.not_undone] == [
            "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb was replaced by somebody else"
        ]
        assert same_bits(step(model), step(qwen3())) and len(calls) == 4  # through ours to the original
        HOME.apply_rotary_pos_emb = ours  # they put back what they had found: it is the original now, to all effects
        again = kernelized_qwen3()
        assert installed(again) == QWEN3
        unkernelize(again)
        assert HOME.apply_rotary_pos_emb is ours and same_bits(step(model), step(again))
    finally:
        HOME.apply_rotary_pos_emb = rope


# --- what installers may patch ----------------------------------------------------------------------------------------


class Other(nn.Module):
    def forward(self, x):
        return x


def test_a_patch_may_be_of_a_child_a_parameter_a_buffer_or_an_attribute():
    model = qwen3()
    model.model.register_buffer("table", torch.zeros(2), persistent=False)
    before, bits = look(model), step(model)
    new = {
        "mlp": Other(),
        "weight": nn.Parameter(torch.full((64,), 2.0)),
        "table": torch.ones(2),
        "variance_epsilon": 1e-2,
        "brand_new": 1,
    }

    def install(model, target, impl):
        layer = model.model.layers[0]
        holders = (layer, model.model.norm, model.model, model.model.norm, layer)
        for holder, (name, value) in zip(holders, new.items(), strict=True):
            patch(holder, name, value)
        return 1

    choice = KernelChoice("rms_norm", ("loopback",), installer=install)
    kernelize(model, {"anything": choice} | loopback("Qwen3MLP.forward"))
    layer = model.model.layers[0]
    assert layer.mlp is new["mlp"] and model.model.norm.weight is new["weight"] and model.model.table is new["table"]
    assert layer.brand_new == 1 and list(layer._modules)[1] == "mlp"
    undone = unkernelize(model)
    assert undone.not_undone == () and undone.patches == 5
    assert differences(before, look(model)) == [] and same_bits(step(model), bits)


def test_a_patch_of_a_dead_module_is_not_taken_for_one_of_its_successor():
    """An id is free again after a death."""

    def install(model, target, impl):
        patch(model.part, "mark", object())
        return 1

    def model_with_part():
        model = nn.Module()
        model.part = Other()
        return model

    choice = {"anything": KernelChoice("rms_norm", ("loopback",), installer=install)}
    models = [kernelize(model_with_part(), choice) for _ in range(20)]
    addresses = {id(model.part) for model in models}
    for model in models:
        del model.part
    successors = []
    while not successors or id(successors[-1].part) not in addresses:
        successors.append(kernelize(model_with_part(), choice))
        assert len(successors) < 2000, "no id was used again: nothing was tested"
    for model in successors:
        assert report(model).row("anything").state == "installed" and hasattr(model.part, "mark")
    for model in (*models, *successors):
        assert unkernelize(model).not_undone == ()
    assert not any(hasattr(model.part, "mark") for model in successors)


def test_an_installer_is_called_again_for_a_model_that_has_grown(own_registry):
    register_op("toy", implementations={"any": KernelImpl(lambda target: lambda self, x: x, lambda: (True, None))})

    def install(model, target, impl):
        mlps = [module for module in model.modules() if isinstance(module, Qwen3MLP)]
        for mlp in mlps:
            patch(mlp, "forward", lambda x: 2 * x)
        return len(mlps)

    choice = {f"{HOME.__name__}.Qwen3MLP.forward": KernelChoice("toy", ("any",), install)}
    model = nn.Sequential(*(layer.mlp for layer in qwen3().model.layers))
    kernelize(model, choice)
    config = qwen3().config
    model.append(Qwen3MLP(config))
    kernelize(model, choice)
    assert [mlp.forward(1) for mlp in model] == [2, 2, 2] and installed(model) == {"qwen3.Qwen3MLP.forward": 3}
    model[0] = Qwen3MLP(config)
    kernelize(model, choice)
    assert [mlp.forward(1) for mlp in model] == [2, 2, 2] and installed(model) == {"qwen3.Qwen3MLP.forward": 3}
    assert unkernelize(model).patches == 3
    assert not any("forward" in vars(mlp) for mlp in model)


def test_a_logical_entry_is_installed_again_where_a_part_was_replaced():
    def install(model, target, impl):
        patch(model.part, "mark", 1)
        return 1

    choice = {"anything": KernelChoice("rms_norm", ("loopback",), installer=install)}
    model = nn.Module()
    model.part = Other()
    kernelize(model, choice)
    model.part = Other()
    kernelize(model, choice)
    assert model.part.mark == 1
    assert unkernelize(model).patches == 1 and not hasattr(model.part, "mark")


class Registering(Qwen3RMSNorm):
    known = {}

    def __init_subclass__(cls, **kwargs):
        Registering.known[cls.__name__] = cls


class Registered(Registering):
    pass


def test_a_class_is_not_told_of_what_is_derived_from_it():
    model = nn.ModuleList([Registered(64)])
    kernelize(model, {Qwen3RMSNorm: KernelChoice("rms_norm", ("loopback",))})
    assert report(model).row("Qwen3RMSNorm").state == "installed" and type(model[0]).__bases__ == (Registered,)
    assert Registering.known == {"Registered": Registered}
    unkernelize(model)
    assert type(model[0]) is Registered


class One(type):
    """Makes one class."""

    made = []

    def __init__(cls, *args):
        super().__init__(*args)
        One.made.append(cls)
        if len(One.made) > 1:
            raise TypeError("no further classes, please")


class OnlyOne(Qwen3RMSNorm, metaclass=One):
    pass


def test_a_class_that_can_not_be_derived_from_is_a_reason():
    model = qwen3()
    choice = KernelChoice("rms_norm", ("loopback",))
    model.model.norm = OnlyOne(64)
    kernelize(model, {Qwen3RMSNorm: choice} | loopback("Qwen3MLP.forward"))
    row = report(model).row("Qwen3RMSNorm")
    assert row.state == "refused" and type(model.model.norm) is OnlyOne
    assert "deriving from OnlyOne raised TypeError: no further classes, please" in row.why()
    assert installed(model) == {"qwen3.Qwen3MLP.forward": 2}
    assert unkernelize(model).not_undone == ()


class Slotted(Qwen3RMSNorm):
    __slots__ = ("more",)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_of_another_layout_is_a_reason(device):
    model = presets.build("qwen3", device=device)
    kernelize(model, {Qwen3RMSNorm: Slotted} | loopback("Qwen3MLP.forward"))
    row = report(model).row("Qwen3RMSNorm")
    assert row.state == "refused" and "object layout differs" in row.why()
    assert {type(m) for m in model.modules() if isinstance(m, Qwen3RMSNorm)} == {Qwen3RMSNorm}
    assert installed(model) == {"qwen3.Qwen3MLP.forward": 2}
    assert unkernelize(model).not_undone == ()
