"""The fused loss: every language model's own, without its logits, in every way that models are called."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import nn

from tests.support.models import clean_process, differences, look, rows_of  # noqa: F401
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

FUSED = {"fused_ce": KernelChoice("causal_lm_loss", ("torch",))}
WITHOUT_LOSS = ("gemma4_vision", "internvl")
WITH_LOSS = sorted(set(presets.PRESETS) - set(WITHOUT_LOSS))


def build(name="qwen3", **options):
    """In training mode without dropout, so that a second run gives the same."""
    model = presets.build(name, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def step(model, inputs=None, **more):
    """Outputs, and the gradient of every parameter that gets one."""
    model.zero_grad(set_to_none=True)
    outputs = model(**({**presets.inputs(model)} if inputs is None else inputs), **more)
    outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return outputs, gradients


def assert_same(ours, theirs):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss)
    assert ours[0].loss.dtype == theirs[0].loss.dtype and list(ours[1]) == list(theirs[1])
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def the_row(model):
    (row,) = report(model).rows
    return row


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
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    outputs = step(model)[0]
    assert seen[0] is outputs.logits and the_row(model).fallbacks == {"the head has hooks": 1}
    handle.remove()
    assert step(model)[0].logits is None
    unkernelize(model)


def with_penalty(self, *args, labels=None, **kwargs):
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))
    return types.SimpleNamespace(loss=loss + logits.square().mean(), logits=logits)


def by_hand(self, *args, labels=None, **kwargs):
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    shares = torch.log_softmax(logits[:, :-1] / 2, dim=-1)
    return {"loss": -shares.gather(-1, labels[:, 1:, None]).mean(), "logits": logits}


def with_loss_layer(self, *args, labels=None, **kwargs):
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    return nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, logits.size(-1)), labels[..., 1:].flatten()), logits


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
    assert torch.equal(found[0], logits)
    unkernelize(model)


# --- where it is installed --------------------------------------------------------------------------------------------


def test_with_the_default_config_and_said_in_the_row():
    mapping = {**DEFAULT_KERNEL_CONFIG, **FUSED}
    model = build()
    assert plan(model, mapping).row("fused_ce").state == "installed" and "fused_ce" not in DEFAULT_KERNEL_CONFIG
    kernelize(model, mapping)
    assert "None as its logits" in report(model).row("fused_ce").why()
    unkernelize(model)


def test_verified_and_a_wrong_loss_is_caught(own_registry):
    right = KernelImpl(lambda target: functools.partial(_half, factor=1.0), lambda: (True, None))
    wrong = KernelImpl(lambda target: functools.partial(_half, factor=0.5), lambda: (True, None))
    from twinkle.kernel.registry import get_op

    op = get_op("causal_lm_loss")
    register_op(
        "twofold_loss",
        implementations={"wrong": wrong, "right": right},
        installer=op.installer,
        reference=op.reference,
        scope="model",
    )
    model = kernelize(build(), {"fused_ce": KernelChoice("twofold_loss", ("wrong", "right"))}, verify=True, strict=True)
    row = the_row(model)
    assert (row.state, row.backend, row.verified) == ("installed", "right", True)
    assert "times the allowed error" in row.why()
    unkernelize(model)


def _half(x, weight, target, *, factor, bias=None, class_weight=None, scale=1.0, softcap=None, **options):
    from twinkle.loss import linear_cross_entropy

    settings = {"bias": bias, "class_weight": class_weight, "scale": scale, "softcap": softcap}
    return factor * linear_cross_entropy(x, weight, target, **settings, **options)


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(order):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(build(), config)

    theirs = step(adapted(), presets.inputs(build()))
    if order == "after":
        model = kernelize(adapted(), FUSED)
    else:
        torch.manual_seed(0)
        model = peft.get_peft_model(kernelize(build(), FUSED), config)
    ours = step(model, presets.inputs(build()))
    assert_same(ours, theirs)
    assert the_row(model).calls == 1 and ours[0].logits is None
    assert unkernelize(model).not_undone == ()


def test_an_adapted_head_is_refused_or_left_to_itself():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = kernelize(peft.get_peft_model(build(), config), FUSED)
    assert the_row(model).state == "refused"
    assert "lm_head is a peft." in the_row(model).why() and "leave the head out of the adapter" in the_row(model).why()
    assert step(model, presets.inputs(build()))[0].logits is not None
    unkernelize(model)

    torch.manual_seed(0)
    theirs = step(peft.get_peft_model(build(), config), presets.inputs(build()))
    model = kernelize(build(), FUSED)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    assert_same(step(wrapped, presets.inputs(build())), theirs)
    assert the_row(wrapped).calls == 0 and len(the_row(wrapped).fallbacks) == 1
    unkernelize(wrapped)


def test_heads_that_are_no_plain_layers():
    def parametrised(model):
        nn.utils.parametrizations.weight_norm(model.lm_head)

    def hooked(model):
        model.lm_head.forward = types.MethodType(lambda self, x: type(self).forward(self, 2 * x), model.lm_head)

    def replaced(model):
        model.lm_head = nn.Sequential(model.lm_head)

    for change, why in ((parametrised, "parametrised"), (hooked, "forward of its own"), (replaced, "Sequential")):
        model = build()
        change(model)
        kernelize(model, FUSED)
        assert the_row(model).state == "refused" and why in the_row(model).why()
        unkernelize(model)


def test_copies_and_further_calls():
    model = kernelize(build(), FUSED)
    theirs = step(model)
    twin = copy.deepcopy(model)
    assert_same(step(twin), theirs)
    assert step(twin)[0].logits is None and the_row(twin).calls == 3
    assert unkernelize(model).modules == 2 and step(model)[0].logits is not None
    assert step(twin)[0].logits is None
    unkernelize(twin)

    kernelize(model, FUSED)
    step(model)
    kernelize(model, FUSED)
    assert the_row(model).calls == 1, "the very same again is left alone"
    kernelize(model, {"fused_ce": KernelChoice("causal_lm_loss", ("refuse",))})
    assert the_row(model).state == "refused" and step(model)[0].logits is not None
    unkernelize(model)


def test_a_frozen_head_and_a_frozen_body():
    for name in ("lm_head", "model"):
        model = build()
        getattr(model, name).requires_grad_(False)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=name == "model")
        theirs = step(model)
        kernelize(model, FUSED)
        assert_same(step(model), theirs)
        assert the_row(model).calls == 1
        unkernelize(model)


# --- under a compiler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere2"])
def test_compiled_into_one_graph(name):
    torch._dynamo.reset()
    model = build(name)
    theirs = step(model)
    kernelize(model, FUSED)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        outputs = compiled(**presets.inputs(model))
    assert len(graphs) == 1 and outputs.logits is None
    assert "twinkle.linear_cross_entropy" in graphs[0].code
    outputs.loss.backward()
    assert_same((outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), theirs)
    assert the_row(model).counts.compiled
    with torch.no_grad():
        assert torch.equal(compiled(**presets.inputs(model)).logits, theirs[0].logits)
    unkernelize(model)
    torch._dynamo.reset()


def test_it_is_left_to_a_compiler_that_cant_see_through_a_loss_layer():
    torch._dynamo.reset()
    model = build()
    model.__class__ = type("Own", (type(model),), {"forward": with_loss_layer})
    expected = model(**presets.inputs(model))[0]
    kernelize(model, FUSED)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    loss, logits = compiled(**presets.inputs(model))
    torch.testing.assert_close(loss, expected)
    assert logits is not None
    with contextlib.suppress(KeyError):
        unkernelize(model)
    torch._dynamo.reset()
