"""The fused loss: every language model's own, without its logits, in every way that models are called."""

from __future__ import annotations

import copy
import threading
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import nn

from tests.support.fused_loss import FUSED, assert_same, build, step, the_row, with_loss_layer
from tests.support.models import clean_process, differences, look, rows_of  # noqa: F401
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.ops.causal_lm_loss.liger import _accepts_call
from twinkle.kernel.ops.causal_lm_loss.pending_logits import PendingLogits
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

WITHOUT_LOSS = ("gemma4_vision", "internvl")
WITH_LOSS = sorted(set(presets.PRESETS) - set(WITHOUT_LOSS))


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_LOSS)
def test_every_familys_loss(name):
    """Casts, scales, caps, shifts and averages are the model's own code; none of them needs logits."""
    model = build(name)
    theirs = step(model)  # transformers notes some things on its modules then
    before = look(model)
    kernelize(model, FUSED)
    ours = step(model)
    row = the_row(model)
    assert (row.state, row.backend, row.scope, row.instances) == ("installed", "torch", "model", 1)
    assert (row.calls, row.fallbacks) == (1, {})
    assert ours[0].logits is None and list(ours[0]) == [key for key in theirs[0] if key != "logits"]
    assert_same(ours, theirs)
    assert unkernelize(model).not_undone == ()
    assert differences(before, look(model)) == []
    assert torch.equal(step(model)[0].logits, theirs[0].logits)


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_a_model_without_a_loss(name):
    model = kernelize(build(name), FUSED)
    assert the_row(model).state == "refused" and "no site" in the_row(model).why()
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "cohere2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_within_the_judgement(name, dtype):
    original = build(name).to(dtype)
    model = kernelize(copy.deepcopy(original), FUSED)
    inputs = presets.inputs(original)
    found = compare_models(original, model, inputs, lambda o: o.loss, lambda o: [("loss", o.loss)])
    assert {c.name: c.used for c in found if c.used > 1} == {} and len(found) > 5
    assert the_row(model).calls == 1
    unkernelize(model)


def test_as_the_trainer_calls_it():
    """Averaged over the tokens of several batches, as a number and as a tensor."""
    model = build()
    for tokens in (50, torch.tensor(50)):
        theirs = step(model, num_items_in_batch=tokens)
        kernelize(model, FUSED)
        assert_same(step(model, num_items_in_batch=tokens), theirs)
        assert the_row(model).calls == 1
        unkernelize(model)


def test_further_arguments_of_forward():
    model = build()
    inputs = presets.inputs(model)
    labels = inputs["labels"].clone()
    labels[0, :5] = -100
    cases = [
        {"labels": labels},
        {"shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()},
        {"attention_mask": torch.ones_like(labels), "use_cache": False},
        {"output_hidden_states": True},
    ]
    theirs = [step(model, {**inputs, **case}) for case in cases]
    kernelize(model, FUSED)
    for case, expected in zip(cases, theirs, strict=True):
        assert_same(step(model, {**inputs, **case}), expected)
    assert the_row(model).calls == len(cases) and the_row(model).fallbacks == {}
    loss, *rest = model(**inputs, return_dict=False)
    assert torch.equal(loss, model(**inputs).loss) and not any(isinstance(t, torch.Tensor) for t in rest)
    by_position = model(inputs["input_ids"], None, None, None, None, labels)
    assert by_position.logits is None and torch.allclose(by_position.loss, theirs[0][0].loss)
    unkernelize(model)


def test_routers_keep_their_loss():
    model = build("qwen3_moe")
    theirs = step(model, output_router_logits=True)
    kernelize(model, FUSED)
    ours = step(model, output_router_logits=True)
    assert_same(ours, theirs)
    torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss)
    unkernelize(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    model = build()
    with torch.autocast("cpu", dtype):
        theirs = step(model)
        kernelize(model, FUSED)
        ours = step(model)
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-3, atol=1e-3)
    assert ours[0].loss.dtype == theirs[0].loss.dtype and the_row(model).calls == 1
    gap = max(float((ours[1][name] - g).norm() / g.norm()) for name, g in theirs[1].items())
    assert gap < 0.05
    unkernelize(model)


def test_what_ligers_loss_is_not_asked_for():
    """Apart from the device."""
    x, weight, target = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.long)
    assert "doesn't scale" in _accepts_call(x, weight, target, scale=2.0)
    assert "before a scaler's factor" in _accepts_call(x.half(), weight.half(), target)
    with torch.autocast("cpu", torch.float16):
        assert "before a scaler's factor" in _accepts_call(x, weight, target)
    assert "no gradient where its input" in _accepts_call(x, weight.requires_grad_(), target)


def test_checkpointed():
    model = build()
    theirs = step(model)
    model.gradient_checkpointing_enable()
    kernelize(model, FUSED)
    assert_same(step(model), theirs)
    unkernelize(model)


# --- when logits are wanted -------------------------------------------------------------------------------------------


def test_logits_where_they_are_wanted():
    model = build()
    inputs = presets.inputs(model)
    without = {key: value for key, value in inputs.items() if key != "labels"}
    logits = model(**inputs).logits
    kernelize(model, FUSED)
    assert torch.equal(model(**without).logits, logits)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(model.lm_head(model.model(**without).last_hidden_state), logits)
    assert model.generate(inputs["input_ids"][:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    reasons = the_row(model).fallbacks
    assert the_row(model).calls == 0 and reasons["not in training: the logits are kept"] == 2
    assert reasons["no labels: the logits are wanted"] == 4
    unkernelize(model)


def test_hooks_see_logits():
    model = kernelize(build(), FUSED)
    seen = []
    see = lambda module, args, output: seen.append(output)  # noqa: E731
    with model.lm_head.register_forward_hook(see):
        outputs = step(model)[0]
    assert seen[0] is outputs.logits and the_row(model).fallbacks == {"the head has hooks": 1}
    assert step(model)[0].logits is None
    with nn.modules.module.register_module_forward_hook(see):
        assert step(model)[0].logits is not None and not any(isinstance(output, PendingLogits) for output in seen)
    model.lm_head.forward = types.MethodType(
        lambda self, x: seen.append(type(self).forward(self, x)) or seen[-1], model.lm_head
    )
    assert step(model)[0].logits is seen[-1]
    del model.lm_head.forward
    reasons = the_row(model).fallbacks
    assert set(reasons) > {"there are hooks for all modules", "the head has a forward of its own"}
    unkernelize(model)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
@pytest.mark.filterwarnings("ignore:(For backward hooks to be called|Full backward hook is firing)")
def test_hooks_for_all_modules_see_the_head(register):
    model, seen = kernelize(build(), FUSED), []
    with register(lambda module, *_: seen.append(module)):
        assert step(model)[0].logits is not None
    assert model.lm_head in seen
    assert the_row(model).fallbacks == {"there are hooks for all modules": 1}
    unkernelize(model)


def with_penalty(self, *args, labels=None, **kwargs):
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))
    return types.SimpleNamespace(loss=loss + logits.square().mean(), logits=logits)


def by_hand(self, *args, labels=None, **kwargs):
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    shares = torch.log_softmax(logits[:, :-1] / 2, dim=-1)
    return {"loss": -shares.gather(-1, labels[:, 1:, None]).mean(), "logits": logits}


@pytest.mark.parametrize("forward", [with_penalty, by_hand, with_loss_layer])
def test_models_with_a_loss_of_their_own(forward):
    """What can't be done without logits gets them, with the right gradients, and is told."""
    qwen3 = type(build())
    own = type("Own", (qwen3,), {"forward": forward})
    model = build()
    model.__class__ = own
    inputs = presets.inputs(model)

    def loss_and_gradients():
        model.zero_grad(set_to_none=True)
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else getattr(outputs, "loss", None)
        (outputs[0] if loss is None else loss).backward()
        return [p.grad.clone() for p in model.parameters()]

    theirs = loss_and_gradients()
    kernelize(model, FUSED)
    for ours, expected in zip(loss_and_gradients(), theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    row = the_row(model)
    if forward is by_hand:
        assert row.calls == 0 and list(row.fallbacks) == ["the model needs its logits: log_softmax"]
    else:
        assert row.calls == 1
    unkernelize(model)


def test_a_teacher_within_the_students_forward_gives_its_logits():
    teacher = kernelize(build(), FUSED)

    def with_teacher(self, *args, labels=None, **kwargs):
        logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
        wanted = torch.softmax(teacher(*args, **kwargs).logits, -1)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return types.SimpleNamespace(loss=loss - (wanted * torch.log_softmax(logits, -1)).sum(), logits=logits)

    model = presets.build("qwen3", seed=1).train()
    model.__class__ = type("Student", (type(model),), {"forward": with_teacher})
    theirs = step(model)
    kernelize(model, FUSED)
    assert_same(step(model), theirs)
    assert the_row(teacher).calls == 0 and the_row(model).calls == 1
    unkernelize(model)
    unkernelize(teacher)


def test_two_threads_with_one_model():
    """While one thread trains, another that evaluates gets logits."""
    model = build()
    inputs = presets.inputs(model)
    logits = model(**inputs).logits
    kernelize(model, FUSED)
    found, at_head, seen = [], threading.Event(), threading.Event()

    def evaluate():
        at_head.wait(10)
        with torch.no_grad():
            found.append(model(**inputs).logits)
        seen.set()

    inner = model.model.forward

    def wait(*args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            at_head.set()
            assert seen.wait(10)
        return inner(*args, **kwargs)

    thread = threading.Thread(target=evaluate)
    thread.start()
    model.model.forward = wait
    assert model(**inputs).logits is None
    thread.join()
    del model.model.forward
    assert type(found[0]) is torch.Tensor and torch.equal(found[0], logits)
    assert type(model.lm_head(model.model(inputs["input_ids"]).last_hidden_state)) is torch.Tensor
    unkernelize(model)


def test_two_models_with_one_head():
    """The outer one's forward is what counts; an inner one that computes the loss for it does so as part of that."""
    qwen3 = type(build())

    def forward(self, input_ids, labels=None):
        return self.inner(input_ids=input_ids, labels=labels)

    outer = type("Outer", (qwen3,), {"forward": forward})(build().config).train()
    outer.inner = build()
    del outer.model, outer.lm_head
    outer.get_output_embeddings = lambda: outer.inner.lm_head
    theirs = step(outer)
    kernelize(outer, FUSED)
    ours = step(outer)
    assert_same(ours, theirs)
    assert ours[0].logits is None and (the_row(outer).instances, the_row(outer).calls) == (1, 1)
    unkernelize(outer)


def test_an_error_of_the_models_own_is_not_blamed_on_the_kernel():
    model = kernelize(build(), FUSED)
    with pytest.raises(TypeError) as error:
        model(presets.inputs(model)["input_ids"], labels="none")
    assert not getattr(error.value, "__notes__", []) and (the_row(model).calls, the_row(model).errors) == (0, 0)
    unkernelize(model)
