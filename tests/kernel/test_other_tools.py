"""Models that other tools have changed before, or change afterwards: peft, accelerate, HF kernels, Liger, torch."""

from __future__ import annotations

import functools
import sys
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support.models import (
    assert_close,
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
from twinkle.kernel import kernelize
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

# --- peft -------------------------------------------------------------------------------------------------------------


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)  # LoRA's A is drawn from the process's generator
    targets = ["q_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}], ids=["plain", "modules_to_save"])
def test_lora_before_and_after_give_the_same(options):
    plain = lora(qwen3(), **options)
    before, theirs = look(plain), step(plain)
    expected = {**QWEN3, "qwen3.Qwen3RMSNorm": 18 if options else 9}  # peft takes whatever name ends with norm

    kernelize(plain, loopback())
    after_kernelize = lora(kernelized_qwen3(), **options)
    assert installed(plain) == installed(after_kernelize) == expected
    ours = step(plain)
    assert same_bits(ours, step(after_kernelize))
    assert any("lora_B" in name for name in ours) and any("modules_to_save" in name for name in ours) == bool(options)
    assert_close(ours, theirs)
    calls = {target: row.calls for target, row in rows_of(plain).items()}
    assert calls == {"qwen3.Qwen3RMSNorm": 9, "qwen3.Qwen3MLP.forward": 2, "qwen3.apply_rotary_pos_emb": 4}

    for model in (plain, after_kernelize):
        assert unkernelize(model).not_undone == ()
        assert not any(installed_on(type(m)) for m in model.modules())
    assert differences(before, look(plain)) == []
    assert same_bits(step(plain), theirs) and same_bits(step(after_kernelize), theirs)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}], ids=["plain", "modules_to_save"])
def test_lora_merged_and_disabled(options):
    plain, model = lora(qwen3(), **options), lora(kernelized_qwen3(), **options)
    with plain.disable_adapter(), model.disable_adapter():
        theirs, ours = plain(**presets.inputs(qwen3())), model(**presets.inputs(qwen3()))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    assert rows_of(model)["qwen3.Qwen3MLP.forward"].calls == 2

    plain, model = (m.merge_and_unload().requires_grad_(True) for m in (plain, model))
    assert installed(model) == QWEN3
    assert_close(step(model), step(plain))
    assert unkernelize(model).not_undone == ()
    assert same_bits(step(model), step(plain))


def test_undo_of_what_peft_wraps_and_of_the_wrapper():
    model = qwen3()
    wrapper = lora(model)
    home, original = sys.modules[type(model).__module__], sys.modules[type(model).__module__].apply_rotary_pos_emb
    kernelize(wrapper, loopback())
    unkernelize(model)  # all of the wrapper's weights are in it
    assert home.apply_rotary_pos_emb is original and rows_of(wrapper) == {}

    kernelize(model, loopback())
    unkernelize(wrapper)
    assert home.apply_rotary_pos_emb is original and rows_of(model) == {}


# --- accelerate -------------------------------------------------------------------------------------------------------


def add_hooks(model):
    """accelerate's hook on every norm and MLP; returns the list that the hooks write their modules' class names to."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Noting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    for module in model.modules():
        if type(module).__name__ in ("Qwen3RMSNorm", "Qwen3MLP"):
            hooks.add_hook_to_module(module, Noting())
    return seen


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("remove", ["before the undo", "after the undo", "never"])
def test_accelerate_hooks(hooks_first, remove):
    hooks = pytest.importorskip("accelerate.hooks")
    plain = qwen3()
    theirs = step(plain)
    add_hooks(plain)
    model = qwen3()
    if hooks_first:
        seen = add_hooks(model)
        kernelize(model, loopback())
    else:
        kernelize(model, loopback())
        seen = add_hooks(model)
    assert installed(model) == QWEN3
    assert_close(step(model), theirs)
    assert sorted(seen) == ["Qwen3MLP"] * 2 + ["Qwen3RMSNorm"] * 9
    assert {t: r.calls for t, r in rows_of(model).items()} == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}

    if remove == "before the undo":
        hooks.remove_hook_from_module(model, recurse=True)
        assert_close(step(model), theirs)
        assert {t: r.calls for t, r in rows_of(model).items()} == {k: 2 * v for k, v in QWEN3.items()} | {
            "qwen3.apply_rotary_pos_emb": 4
        }
        assert len(seen) == 11
    assert unkernelize(model).not_undone == ()
    if remove == "after the undo":
        hooks.remove_hook_from_module(model, recurse=True)
    if remove != "never":
        hooks.remove_hook_from_module(plain, recurse=True)
    assert same_bits(step(model), theirs)
    # accelerate leaves a bound forward of the class on the instance, with us and without.
    assert [(list(vars(m)), type(m)) for m in model.modules()] == [(list(vars(m)), type(m)) for m in plain.modules()]
    for module in model.modules():
        for name in ("forward", "_old_forward"):
            bound = vars(module).get(name)
            if isinstance(bound, types.MethodType):
                assert bound.__func__ is type(module).forward and bound.__self__ is module


def test_a_hook_over_a_foreign_forward_is_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = qwen3()
    mlp = model.model.layers[0].mlp
    theirs = mlp.forward
    mlp.forward = lambda x: 2 * theirs(x)
    hooks.add_hook_to_module(mlp, hooks.ModelHook())
    expected = step(model)
    kernelize(model, loopback("Qwen3MLP.forward"))
    rows = {row.state: row for row in report(model).rows}
    assert rows["installed"].instances == rows["refused"].instances == 1
    assert "has a forward of its own" in rows["refused"].why()
    assert_close(step(model), expected)
    unkernelize(model)


# --- HF kernels -------------------------------------------------------------------------------------------------------


class _Repository:
    """What HF kernels loads a layer from, without a network."""

    def __init__(self, layer):
        self.layer = layer

    def load(self):
        return self.layer


class ThriceRMSNorm(nn.Module):
    """A layer as the Hub has them: brings a forward only. Wrong on purpose, so that its calls show."""

    def forward(self, hidden_states):
        return 3 * hidden_states


class TwiceRope(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return 2 * q, 2 * k


def hf_kernelize(model, **layers):
    kernels = pytest.importorskip("kernels")
    with kernels.use_kernel_mapping({name: {"cpu": _Repository(layer)} for name, layer in layers.items()}):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")


@pytest.fixture
def restore_rope():
    """HF kernels binds a forward to the function itself, for the whole process."""
    yield
    import transformers.models.qwen3.modeling_qwen3 as home

    if isinstance(home.apply_rotary_pos_emb, nn.Module):
        vars(home.apply_rotary_pos_emb).pop("forward", None)


@pytest.mark.parametrize("kernels_first", [True, False])
def test_use_kernels_of_transformers_without_a_hub_kernel(kernels_first, restore_rope):
    """On a CPU its mapping has nothing: it binds the class's own forward to every module that it knows."""
    pytest.importorskip("kernels")
    theirs = step(qwen3())
    model = qwen3()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kernels_first:
            model.set_use_kernels(True)
            assert any("forward" in vars(m) for m in model.modules() if type(m).__name__ == "Qwen3RMSNorm")
        kernelize(model, loopback())
        if not kernels_first:
            model.use_kernels = True
        assert model.use_kernels
        for flip in (model.train, model.eval, model.train, model.eval):  # each binds again
            flip()
    assert installed(model) == QWEN3
    assert_close(step(model), theirs)
    assert {t: r.calls for t, r in rows_of(model).items()} == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}
    assert unkernelize(model).not_undone == ()
    model.train(), model.eval()
    assert same_bits(step(model), theirs)


def test_hf_kernels_leaves_our_modules_alone_and_we_leave_its_alone(restore_rope):
    model = kernelized_qwen3()
    hf_kernelize(model, RMSNorm=ThriceRMSNorm, rotary_pos_emb=TwiceRope)
    step(model)
    assert {t: r.calls for t, r in rows_of(model).items()} == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}

    theirs = qwen3()
    hf_kernelize(theirs, RMSNorm=ThriceRMSNorm)
    kernelize(theirs, loopback())
    rows = rows_of(theirs)
    assert rows["qwen3.Qwen3RMSNorm"].state == "refused"
    assert "already patched by HF kernels (" in rows["qwen3.Qwen3RMSNorm"].why()
    assert "ThriceRMSNorm.forward" in rows["qwen3.Qwen3RMSNorm"].why()
    assert rows["qwen3.Qwen3MLP.forward"].state == "installed"
    logits = step(model)["logits"]
    assert not torch.allclose(step(theirs)["logits"], logits, rtol=0.1)
    torch.testing.assert_close(logits, step(qwen3())["logits"], rtol=1e-4, atol=1e-5)
    for kernelized in (model, theirs):
        assert unkernelize(kernelized).not_undone == ()


def test_a_function_that_hf_kernels_replaced_is_refused(restore_rope):
    model = qwen3()
    home = sys.modules[type(model).__module__]
    if not isinstance(home.apply_rotary_pos_emb, nn.Module):
        pytest.skip("this transformers doesn't take functions from this version of kernels")
    hf_kernelize(model, rotary_pos_emb=TwiceRope)
    before = home.apply_rotary_pos_emb
    kernelize(model, loopback())
    row = rows_of(model)["qwen3.apply_rotary_pos_emb"]
    assert row.state == "refused" and "already patched by HF kernels" in row.why()
    assert home.apply_rotary_pos_emb is before
    unkernelize(model)


# --- Liger and whoever binds a forward --------------------------------------------------------------------------------


def liger_forward(self, hidden_states):
    return self.weight * hidden_states


liger_forward.__module__ = "liger_kernel.transformers.rms_norm"


def test_liger_on_instances_is_recognised():
    model = qwen3()
    norm = model.model.norm
    norm.forward = types.MethodType(liger_forward, norm)
    before = look(model)
    kernelize(model, loopback("Qwen3RMSNorm"))
    rows = {row.state: row for row in report(model).rows}
    assert rows["installed"].instances == 8 and rows["refused"].instances == 1
    assert "already patched by Liger" in rows["refused"].why()
    unkernelize(model)
    assert differences(before, look(model)) == []


@pytest.mark.parametrize("before_the_model", [True, False])
def test_liger_in_the_place_of_a_class_is_recognised(before_the_model, monkeypatch):
    """Liger's apply functions rebind names of the modeling file; only models made later get its classes."""
    import transformers.models.qwen3.modeling_qwen3 as home

    namespace = {"forward": liger_forward, "__module__": liger_forward.__module__}
    liger = type("LigerRMSNorm", (home.Qwen3RMSNorm,), namespace)
    model = None if before_the_model else qwen3()
    monkeypatch.setattr(home, "Qwen3RMSNorm", liger)
    model = model or qwen3()
    kernelize(model, loopback())
    row = rows_of(model)["qwen3.Qwen3RMSNorm"]
    if before_the_model:
        assert (row.state, row.instances) == ("refused", 9) and "already patched by Liger" in row.why()
    else:  # the model has nothing of Liger's, and what it has is what the name meant
        assert (row.state, row.instances) == ("installed", 9)
    assert rows_of(model)["qwen3.Qwen3MLP.forward"].state == "installed"
    unkernelize(model)


@pytest.fixture
def liger(monkeypatch):
    """Liger itself; what it rebinds in the modeling file is put back afterwards."""
    transformers = pytest.importorskip("liger_kernel.transformers")
    import transformers.models.qwen3.modeling_qwen3 as home

    for name in ("Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(home, name, getattr(home, name))
    return transformers.apply_liger_kernel_to_qwen3


@pytest.mark.liger
@pytest.mark.parametrize("model_first", [True, False])
def test_what_liger_itself_patched_is_recognised(model_first, liger):
    model = qwen3() if model_first else None
    liger(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    model = model or qwen3()
    before = look(model)
    kernelize(model, loopback())
    rows = rows_of(model)
    assert {target: row.instances for target, row in rows.items()} == QWEN3
    assert {row.state for row in rows.values()} == {"refused"}
    assert all("already patched by Liger" in row.why() for row in rows.values())
    assert report(model).uncovered == []
    assert differences(before, look(model)) == []


@pytest.mark.liger
def test_liger_over_our_kernels_is_seen(liger):
    model = kernelized_qwen3()
    liger(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    assert all(
        f"{QWEN3[target]} of the modules have got a forward of their own" in rows_of(model)[target].why()
        for target in ("qwen3.Qwen3RMSNorm", "qwen3.Qwen3MLP.forward")
    )
    undone = unkernelize(model)
    assert undone.modules == 11 and len(undone.not_undone) == 11
    assert "liger" in type(model.model.norm).__module__ + model.model.norm.forward.__func__.__module__


def test_liger_in_the_place_of_a_method_is_recognised(monkeypatch):
    import transformers.models.qwen3.modeling_qwen3 as home

    monkeypatch.setattr(home.Qwen3RMSNorm, "forward", liger_forward)
    model = qwen3()
    before = look(model)
    kernelize(model, loopback("Qwen3RMSNorm"))
    row = rows_of(model)["qwen3.Qwen3RMSNorm"]
    assert (row.state, row.instances) == ("refused", 9) and "already patched by Liger" in row.why()
    assert differences(before, look(model)) == []


def test_a_closure_on_an_instance_is_refused():
    model = qwen3()
    mlp, norm = model.model.layers[1].mlp, model.model.norm
    mlp.forward = functools.partial(type(mlp).forward, mlp)
    norm.forward = types.MethodType(lambda self, x: 2 * x, norm)
    expected = step(model)
    kernelize(model, loopback())
    refused = {row.op: row for row in report(model).rows if row.state == "refused"}
    assert {op: row.instances for op, row in refused.items()} == {"rms_norm": 1, "swiglu": 1}
    assert "forward of its own (functools.partial), which would shadow the kernel" in refused["swiglu"].why()
    assert "refused.<locals>.<lambda>), which would shadow the kernel" in refused["rms_norm"].why()
    assert_close(step(model), expected)
    unkernelize(model)
    assert same_bits(step(model), expected)
