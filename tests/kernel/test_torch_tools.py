"""What torch itself does to modules: parametrisation, checkpointing, autocast, hooks, casts; and ZeRO-3's weights."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from torch.nn.utils import parametrize

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
from twinkle.kernel.reclass import peel
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parametrised_projections_inside_a_kernelized_mlp():
    model = qwen3()
    for projection in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].self_attn.q_proj):
        parametrize.register_parametrization(projection, "weight", Doubled())
    before, theirs = look(model), step(model)
    kernelize(model, loopback())
    assert installed(model) == QWEN3
    assert_close(step(model), theirs)
    unkernelize(model)
    assert differences(before, look(model)) == [] and same_bits(step(model), theirs)


@pytest.mark.skipif(len(torch.backends.quantized.supported_engines) < 2, reason="this PyTorch quantises nothing")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore::DeprecationWarning")
def test_quantised_projections_inside_a_kernelized_mlp():
    """Its projections are called, not read, so they may be of any class."""
    model = qwen3().eval()
    model.model = torch.ao.quantization.quantize_dynamic(model.model, {nn.Linear}, dtype=torch.qint8)
    assert type(model.model.layers[0].mlp.gate_proj) is not nn.Linear
    inputs = presets.inputs(model)
    with torch.no_grad():
        theirs = model(**inputs).logits
        kernelize(model, loopback())
        ours = model(**inputs).logits
    assert installed(model) == QWEN3
    torch.testing.assert_close(ours, theirs)
    unkernelize(model)


def test_a_parametrised_norm_is_refused():
    model = qwen3()
    parametrize.register_parametrization(model.model.norm, "weight", Doubled())
    cls, theirs = type(model.model.norm), step(model)
    kernelize(model, loopback())
    rows = {(row.op, row.state): row for row in report(model).rows}
    assert rows["rms_norm", "installed"].instances == 8 and rows["rms_norm", "refused"].instances == 1
    assert "parametrised" in rows["rms_norm", "refused"].why()
    assert type(model.model.norm) is cls
    assert_close(step(model), theirs)
    unkernelize(model)
    assert same_bits(step(model), theirs)


@pytest.mark.parametrize("remove", ["before the undo", "after the undo", "never"])
def test_a_norm_parametrised_after_kernelize(remove):
    plain, model = qwen3(), kernelized_qwen3()
    original = step(plain)
    for each in (plain, model):
        parametrize.register_parametrization(each.model.norm, "weight", Doubled())
    theirs = step(plain)
    assert_close(step(model), theirs)
    assert rows_of(model)["qwen3.Qwen3RMSNorm"].calls == rows_of(model)["qwen3.Qwen3RMSNorm"].instances == 9
    twin = copy.deepcopy(model)
    assert_close(step(twin), theirs)

    if remove == "before the undo":
        parametrize.remove_parametrizations(model.model.norm, "weight", leave_parametrized=False)
        assert_close(step(model), original)
    for each in (twin, model):
        assert unkernelize(each).not_undone == ()
    if remove == "after the undo":
        parametrize.remove_parametrizations(model.model.norm, "weight", leave_parametrized=False)
    norm = model.model.norm
    if remove == "never":
        assert parametrize.is_parametrized(norm) and same_bits(step(model), theirs)
        assert same_bits(step(copy.deepcopy(model)), theirs)
    else:
        assert type(norm) is type(plain.model.layers[0].input_layernorm) and same_bits(step(model), original)
    assert same_bits(step(twin), theirs)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("enable_first", [True, False])
def test_gradient_checkpointing(use_reentrant, enable_first):
    plain, model = qwen3().train(), qwen3().train()
    enable = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    plain.gradient_checkpointing_enable(**enable)
    theirs = step(plain)
    if enable_first:
        model.gradient_checkpointing_enable(**enable)
    kernelize(model, loopback())
    if not enable_first:
        model.gradient_checkpointing_enable(**enable)
    assert_close(step(model), theirs)
    assert rows_of(model)["qwen3.Qwen3MLP.forward"].calls == 4  # forward, and again for the backward
    unkernelize(model)
    assert same_bits(step(model), theirs)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_autocast(weights):
    model = qwen3(dtype=weights)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = step(model)
        kernelize(model, loopback())
        ours = step(model)
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    for name, tensor in theirs.items():  # the same roundings at the same places
        torch.testing.assert_close(ours[name], tensor, rtol=2e-2, atol=2e-2 * float(tensor.abs().max()))
    assert rows_of(model)["qwen3.Qwen3RMSNorm"].calls == 9
    unkernelize(model)


def test_half_and_to_after_kernelize():
    model = kernelized_qwen3()
    assert installed(model.to(torch.bfloat16)) == QWEN3
    plain = qwen3(dtype=torch.bfloat16)
    plain.model.rotary_emb.to(torch.bfloat16)  # which .to(dtype) rounds as well
    ours, theirs = step(model), step(plain)
    assert {t.dtype for t in ours.values()} == {torch.bfloat16}
    torch.testing.assert_close(ours["logits"], theirs["logits"], rtol=2e-2, atol=2e-2)
    assert step(model.half())["logits"].dtype == torch.float16
    assert step(model.float().to("cpu"))["logits"].dtype == torch.float32
    assert installed(model.to("meta")) == QWEN3
    unkernelize(model)


def test_hooks_of_torch_still_run():
    model = qwen3()
    seen = []
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    norm.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    mlp.register_forward_hook(lambda module, args, result: seen.append("post"))
    mlp.register_full_backward_hook(lambda module, *gradients: seen.append("backward"))
    kernelize(model, loopback())
    norm.register_forward_hook(lambda module, args, result: seen.append("later"))
    step(model)
    assert seen == ["post", "pre", "later", "backward"]
    unkernelize(model)
    step(model)
    assert seen[4:] == seen[:4]


@pytest.mark.parametrize("preset", ["qwen3", "qwen3_moe", "gemma4", "phi3"])
def test_parameters_of_size_zero_as_zero3_keeps_them(preset):
    """DeepSpeed's ZeRO-3 leaves empty parameters between calls and gathers them in hooks around each module."""
    expected = installed(kernelize(presets.build(preset), loopback(f"{preset}.")))
    plain, model = presets.build(preset), presets.build(preset)
    theirs = step(plain)
    full = {}
    for parameter in model.parameters():
        full[parameter] = parameter.data
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    kernelize(model, loopback(f"{preset}."))
    assert installed(model) == expected
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    for parameter, data in full.items():
        parameter.data = data
    assert_close(step(model), theirs)
    unkernelize(model)
    assert same_bits(step(model), theirs)


def test_classes_of_torch_are_not_taken_for_wrappers():
    """``DataParallel`` ends its bases with ``typing.Generic``; what torch makes at run time ends them with a layer."""
    wrapped = nn.DataParallel(qwen3())
    assert peel(type(wrapped)) is nn.DataParallel
    kernelize(wrapped, loopback())
    assert installed(wrapped) == QWEN3 and type(wrapped) is nn.DataParallel
    assert_close(step(wrapped.module), step(qwen3()))
    unkernelize(wrapped)
