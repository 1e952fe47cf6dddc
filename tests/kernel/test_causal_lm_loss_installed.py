"""Where the fused loss is installed, where it is refused, and what a compiler makes of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support.fused_loss import FUSED, assert_same, build, step, the_row, with_loss_layer
from tests.support.models import clean_process, differences, look, rows_of  # noqa: F401
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize

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
