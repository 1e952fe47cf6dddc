"""What becomes of a kernelized model: copies, pickles, threads, further calls, and undo in every order."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from tests.support.models import (
    assert_close,
    clean_process,  # noqa: F401
    differences,
    installed,
    look,
    mapping,
    rows_of,
    same_bits,
    step,
)
from tests.support.qwen3 import QWEN3, kernelized_qwen3, loopback, qwen3
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize, registry
from twinkle.kernel.ops.derived import reference_impl
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import Undone, patch, unkernelize

HOME = sys.modules[Qwen3MLP.__module__]


@pytest.fixture
def second_backend():
    registry.register_backend_for_every_op("loopback2", reference_impl)
    yield "loopback2"
    registry.unregister_backend_for_every_op("loopback2")


# --- what a kernelized model looks like -------------------------------------------------------------------------------


def test_nothing_but_classes_and_functions_changes():
    model = qwen3()
    before = look(model)
    names = [name for name, _ in model.named_modules()]
    kernelize(model, loopback())
    assert {key.partition(" ")[0] for key in differences(before, look(model))} == {"class", "globals"}
    assert [name for name, _ in model.named_modules()] == names
    unkernelize(model)


def test_classes_pass_for_the_original():
    model = kernelized_qwen3()
    mlp = model.model.layers[0].mlp
    cls = type(mlp)
    assert cls is not Qwen3MLP and isinstance(mlp, Qwen3MLP) and issubclass(cls, Qwen3MLP)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(cls, attribute) == getattr(Qwen3MLP, attribute)
    assert cls.forward.__name__ == "forward" and cls.forward.__qualname__ == "Qwen3MLP.forward"
    assert type(model.model.layers[1].mlp) is cls  # one class for all that are alike
    assert HOME.apply_rotary_pos_emb.__name__ == "apply_rotary_pos_emb"
    assert not hasattr(cls, "kernel_layer_name") and not hasattr(type(model.model.norm), "kernel_layer_name")
    assert Qwen3RMSNorm.kernel_layer_name == "RMSNorm"
    fresh = type(model.model.norm)(8)  # made like any other
    assert torch.equal(fresh(torch.ones(2, 8)), Qwen3RMSNorm(8)(torch.ones(2, 8)))
    unkernelize(model)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_stays_kernelized_and_is_undone_alone(rope):
    model = qwen3()
    before, bits = look(model), step(model)
    kernelize(model, loopback())
    ours = step(model)
    twin = copy.deepcopy(model)
    assert installed(twin) == installed(model) == QWEN3
    assert same_bits(step(twin), ours)
    assert rows_of(twin)["qwen3.Qwen3MLP.forward"].calls == 4  # a copy counts together with its original
    assert not set(map(id, twin.parameters())) & set(map(id, model.parameters()))

    assert unkernelize(twin).not_undone == ()
    assert not any(installed_on(type(m)) for m in twin.modules()) and rows_of(twin) == {}
    assert installed(model) == QWEN3 and HOME.apply_rotary_pos_emb is not rope
    assert same_bits(step(model), ours)

    assert unkernelize(model).not_undone == ()
    assert differences(before, look(model)) == []
    assert same_bits(step(twin), bits) and same_bits(step(model), bits)


@pytest.mark.parametrize("end", ["undone", "collected"])
def test_a_copy_keeps_the_function_after_its_original(end, rope):
    model = kernelized_qwen3()
    twin = copy.deepcopy(model)
    second = copy.deepcopy(twin)
    if end == "undone":
        unkernelize(model)
    else:
        del model
        gc.collect()
    step(twin)
    assert installed(twin) == QWEN3 and rows_of(twin)["qwen3.apply_rotary_pos_emb"].calls == 2
    unkernelize(twin)
    assert HOME.apply_rotary_pos_emb is not rope and installed(second) == QWEN3
    if end == "undone":
        unkernelize(second)
    else:
        del second
        gc.collect()
    assert HOME.apply_rotary_pos_emb is rope


ROPE = {"qwen3.apply_rotary_pos_emb": 1}


def test_where_only_a_function_is_replaced_the_models_own_class_knows_its_copies(rope):
    model = qwen3()
    before, bits, cls = look(model), step(model), type(model)
    kernelize(model, loopback("qwen3.apply_rotary_pos_emb"))
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__ and type(model.model.norm) is Qwen3RMSNorm
    twin = copy.deepcopy(model)
    assert installed(twin) == installed(model) == ROPE

    assert unkernelize(model) == Undone(shared=("transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb",))
    assert type(model) is cls and installed(model) == {} and installed(twin) == ROPE
    calls = rows_of(twin)["qwen3.apply_rotary_pos_emb"].calls
    step(twin)
    assert rows_of(twin)["qwen3.apply_rotary_pos_emb"].calls == calls + 2
    assert unkernelize(twin) == Undone(patches=1) and type(twin) is cls
    assert HOME.apply_rotary_pos_emb is rope and differences(before, look(model)) == []
    assert same_bits(step(twin), bits)


def test_a_copy_lets_its_original_have_back_what_was_patched_on_its_modules(rope):
    """It claims what is shared, the function; an attribute of one of the original's modules is none of its business."""

    def install(model, target, impl):
        patch(HOME, "apply_rotary_pos_emb", lambda *args, **kwargs: rope(*args, **kwargs))
        patch(model.model.norm, "variance_epsilon", 1.0)
        return 1

    model = qwen3()
    kernelize(model, {Qwen3RMSNorm: KernelChoice("rms_norm", ("loopback",), installer=install)})
    twin = copy.deepcopy(model)
    undone = unkernelize(model)
    assert undone.patches == 1 and len(undone.shared) == 1
    assert model.model.norm.variance_epsilon == 1e-6 and twin.model.norm.variance_epsilon == 1.0
    assert HOME.apply_rotary_pos_emb is not rope
    assert unkernelize(twin) == Undone(patches=1) and HOME.apply_rotary_pos_emb is rope


def test_a_copy_kernelized_anew_leaves_its_original_alone(second_backend):
    model = kernelized_qwen3()
    twin = copy.deepcopy(model)
    kernelize(twin, mapping(second_backend, "qwen3."))
    assert {t: r.backend for t, r in rows_of(model).items()} == dict.fromkeys(QWEN3, "loopback")
    rows = rows_of(twin)
    assert rows["qwen3.Qwen3MLP.forward"].backend == rows["qwen3.Qwen3RMSNorm"].backend == second_backend
    assert "already serves another model" in rows["qwen3.apply_rotary_pos_emb"].why()
    step(model)
    assert {t: r.calls for t, r in rows_of(model).items()} == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}
    unkernelize(twin)
    assert installed(model) == QWEN3
    unkernelize(model)


def test_a_module_of_two_models_keeps_its_kernel_until_both_are_undone(rope):
    first, second = qwen3(), qwen3()
    second.model.norm = first.model.norm
    before = look(second)
    kernelize(first, loopback())
    kernelize(second, loopback())
    undone = unkernelize(first)
    assert undone.shared == ("model.norm",) and undone.not_undone == () and undone.modules == 10
    assert type(first.model.norm) is not Qwen3RMSNorm and installed_on(type(first.model.layers[0].mlp)) is None
    served = Counter()
    for row in report(second).rows:  # the shared norm's is another row than the others'
        served[short(row.target)] += row.instances if row.state == "installed" else 0
    assert +served == QWEN3
    step(second)
    assert unkernelize(second).modules == 11 and type(first.model.norm) is Qwen3RMSNorm
    assert differences(before, look(second)) == [] and HOME.apply_rotary_pos_emb is rope


def test_copied_parts_belong_to_the_model_they_were_copied_from(rope):
    model = kernelized_qwen3()
    norm = copy.deepcopy(model.model.norm)
    shallow = copy.copy(model.model.layers[0].mlp)
    assert type(norm) is type(model.model.norm) and type(shallow) is type(model.model.layers[0].mlp)
    assert shallow.gate_proj is model.model.layers[0].mlp.gate_proj
    x = torch.randn(2, 64)
    assert torch.equal(norm(x), model.model.norm(x))
    unkernelize(model)
    assert HOME.apply_rotary_pos_emb is rope  # a norm alone doesn't hold on to it
    assert unkernelize(norm).modules == 1 and type(norm) is Qwen3RMSNorm
    assert unkernelize(shallow).modules == 1 and type(shallow) is Qwen3MLP


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_classes_that_say_how_they_are_copied(how):
    model = nn.Sequential(Reducing(8), StateKeeping(8))
    bits = [list(vars(how(m))) for m in model], [m(torch.ones(8)) for m in model]
    here = f"{Reducing.__module__}"
    choice = KernelChoice("rms_norm", ("loopback",))
    kernelize(model, {Reducing: choice, StateKeeping: choice})
    assert all(installed_on(type(m)) for m in model), here
    for module, keys, expected in zip(model, *bits, strict=True):
        twin = how(module)
        assert isinstance(twin, (Reducing, StateKeeping)) and list(vars(twin)) == keys
        assert (installed_on(type(twin)) is None) == (how not in (copy.copy, copy.deepcopy))
        torch.testing.assert_close(twin(torch.ones(8)), expected)
    unkernelize(model)


class Reducing(Qwen3RMSNorm):
    """Says itself how it is made again."""

    def __init__(self, width):
        super().__init__(width, 1e-5)
        self.width = width

    def __reduce__(self):
        return (type(self), (self.width,))


class StateKeeping(Qwen3RMSNorm):
    """Leaves part of its state behind."""

    def __init__(self, width):
        super().__init__(width, 1e-5)
        self.cache = lambda: None

    def __getstate__(self):
        return {**self.__dict__, "cache": None}


# --- files ------------------------------------------------------------------------------------------------------------


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def without_functions_of_hf_kernels(model):
    """HF kernels keeps functions on attention layers that can't be pickled, with or without us."""
    for module in model.modules():
        vars(module).pop("_kernel_funcs", None)
    return model


@pytest.mark.parametrize("through", [save_and_load, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_pickle_is_of_the_original(through):
    model = without_functions_of_hf_kernels(qwen3())
    bits, keys = step(model), list(model.state_dict())
    plain = look(through(model))
    kernelize(model, loopback())
    loaded = through(model)
    assert not any(installed_on(type(m)) for m in loaded.modules()) and rows_of(loaded) == {}
    assert type(loaded.model.norm) is Qwen3RMSNorm and list(model.state_dict()) == keys
    theirs = look(loaded)
    assert [key for key in differences(plain, theirs) if key.startswith(("class", "attributes", "state"))] == []
    assert installed(model) == QWEN3
    unkernelize(model)
    assert same_bits(step(loaded), bits)


def test_a_pickle_does_not_need_us():
    model = without_functions_of_hf_kernels(kernelized_qwen3())
    assert b"twinkle" not in pickle.dumps(model.model)
    unkernelize(model)


def test_state_dicts_go_both_ways():
    model, plain = kernelized_qwen3(), presets.build("qwen3", seed=1)
    plain.load_state_dict(model.state_dict())
    assert_close(step(model), step(plain))
    unkernelize(model)
    assert same_bits(step(model), step(plain))


# --- further calls ----------------------------------------------------------------------------------------------------


def test_the_same_again_is_left_alone():
    model = kernelized_qwen3()
    step(model)
    rows, classes, function = rows_of(model), [type(m) for m in model.modules()], HOME.apply_rotary_pos_emb
    kernelize(model, loopback())
    assert {t: r.counts for t, r in rows_of(model).items()} == {t: r.counts for t, r in rows.items()}
    assert [type(m) for m in model.modules()] == classes
    assert HOME.apply_rotary_pos_emb is function
    assert {t: r.calls for t, r in rows.items()} == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}
    unkernelize(model)


def test_another_backend_replaces_the_first(second_backend, rope):
    model = qwen3()
    before, bits = look(model), step(model)
    kernelize(model, loopback())
    kernelize(model, mapping(second_backend, "qwen3."))
    assert installed(model) == QWEN3
    step(model)
    assert {t: (r.backend, r.calls) for t, r in rows_of(model).items()} == {
        t: (second_backend, 2 if t.endswith("emb") else n) for t, n in QWEN3.items()
    }
    assert unkernelize(model).not_undone == () and HOME.apply_rotary_pos_emb is rope
    assert differences(before, look(model)) == [] and same_bits(step(model), bits)


def test_what_is_refused_later_is_taken_off():
    model = qwen3()
    before = look(model)
    kernelize(model, loopback())
    kernelize(model, mapping("refuse", "qwen3."))
    assert {row.state for row in rows_of(model).values()} == {"refused"}
    assert differences(before, look(model)) == []


def test_part_by_part_is_as_all_at_once():
    model = qwen3()
    before = look(model)
    kernelize(model, loopback("Qwen3RMSNorm"))
    step(model)
    norms = rows_of(model)["qwen3.Qwen3RMSNorm"]
    kernelize(model, loopback("Qwen3MLP.forward", "qwen3.apply_rotary_pos_emb"))
    assert installed(model) == QWEN3
    kernelize(model, loopback())
    assert rows_of(model)["qwen3.Qwen3RMSNorm"].counts is norms.counts and norms.calls == 9
    at_once = kernelized_qwen3()
    assert same_bits(step(model), step(at_once))
    unkernelize(at_once)
    unkernelize(model)
    assert differences(before, look(model)) == []


def test_parts_of_a_model_one_by_one(rope):
    model = qwen3()
    before = look(model)
    for layer in model.model.layers:
        kernelize(layer, loopback("Qwen3MLP.forward", "qwen3.apply_rotary_pos_emb"))
    kernelize(model, loopback("Qwen3RMSNorm"))
    step(model)
    first, second = model.model.layers
    unkernelize(first)
    assert not any(installed_on(type(m)) for m in first.modules())
    assert all(installed_on(type(m)) for m in (second.mlp, second.input_layernorm, model.model.norm))
    assert HOME.apply_rotary_pos_emb is not rope  # the second layer wants it
    unkernelize(model)
    assert differences(before, look(model)) == [] and unkernelize(second).modules == 0
