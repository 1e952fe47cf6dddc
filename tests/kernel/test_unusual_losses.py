"""The fused loss of models that do unusual things with their logits: the same numbers, or an error that says why."""

from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import nn

from tests.support.fused_loss import FUSED, assert_same, build, step, the_row
from tests.support.models import clean_process  # noqa: F401
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.ops.causal_lm_loss.installer import _why_not
from twinkle.kernel.ops.causal_lm_loss.pending_logits import Head, PendingLogits
from twinkle.kernel.undo import unkernelize

# --- what is done to logits -------------------------------------------------------------------------------------------


def cross_entropy(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, logits.shape[-1]).float(), labels[..., 1:].reshape(-1))


def measured_first(head, hidden, labels):
    logits = head(hidden)
    with torch.no_grad():
        logits.argmax(-1)
    return cross_entropy(logits, labels) + logits.square().mean()


def measured_in_inference_mode(head, hidden, labels):
    logits = head(hidden)
    with torch.inference_mode():
        logits.argmax(-1)
    return cross_entropy(logits, labels)


def written_through_a_view(head, hidden, labels):
    logits = head(hidden)
    logits.view(-1, logits.shape[-1])[:, 3] = -5.0
    flat = logits.view(-1, logits.shape[-1])
    flat += torch.linspace(0, 1, logits.shape[-1])
    return cross_entropy(logits, labels)


def scaled_under_another_name(head, hidden, labels):
    logits = scaled = head(hidden)
    scaled *= 3
    scaled /= 2
    return cross_entropy(logits, labels)


def copied_before_it_is_written(head, hidden, labels):
    logits = head(hidden)
    copied = logits[torch.arange(len(logits))]
    logits[..., 3] = -5.0
    return cross_entropy(copied, labels)


def capped_by_something_negative(head, hidden, labels):
    return cross_entropy(torch.tanh(head(hidden)) * -2, labels)


def called_by_name(head, hidden, labels):
    return cross_entropy(head(input=hidden), labels)


def called_without_gradients(head, hidden, labels):
    with torch.no_grad():
        wanted = head(2 * hidden)
    logits = head(hidden)
    return cross_entropy(logits, labels) - (wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def its_loss_without_gradients(head, hidden, labels):
    logits = head(hidden)
    with torch.no_grad():
        unconnected = cross_entropy(logits, labels)
        wide = logits.float()
    return unconnected * cross_entropy(logits, labels) + wide.sum() + hidden.square().mean()


def checkpointed_with_its_loss(head, hidden, labels):
    return torch.utils.checkpoint.checkpoint(lambda x: cross_entropy(head(x), labels), hidden, use_reentrant=False)


def its_loss_checkpointed(head, hidden, labels):
    return torch.utils.checkpoint.checkpoint(cross_entropy, head(hidden), labels, use_reentrant=False)


UNUSUAL = {  # a model's loss, and whether the logits have to be computed
    measured_first: True,
    measured_in_inference_mode: True,
    written_through_a_view: True,
    scaled_under_another_name: True,
    copied_before_it_is_written: True,
    capped_by_something_negative: True,
    called_by_name: False,
    called_without_gradients: False,
    its_loss_without_gradients: True,
    checkpointed_with_its_loss: True,
    its_loss_checkpointed: False,
}


def with_loss(function):
    """A model with a loss of its own, which it hands out next to its logits."""

    def forward(self, *args, labels=None, **kwargs):
        return types.SimpleNamespace(
            loss=function(self.lm_head, self.model(*args, **kwargs).last_hidden_state, labels), logits=None
        )

    model = build()
    model.__class__ = type("Own", (type(model),), {"forward": forward})
    return model


@pytest.mark.parametrize("function", UNUSUAL, ids=lambda function: function.__name__)
def test_unusual_things_done_to_logits(function):
    model = with_loss(function)
    theirs = step(model)
    kernelize(model, FUSED)
    assert_same(step(model), theirs)
    assert the_row(model).calls == (not UNUSUAL[function])
    unkernelize(model)


class OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        shares = torch.softmax(logits, -1)
        ctx.save_for_backward(shares)
        return -shares.log().mean()

    @staticmethod
    def backward(ctx, upstream):
        (shares,) = ctx.saved_tensors
        return upstream * (shares - 1 / shares.shape[-1]) / shares[..., 0].numel(), None


@pytest.mark.parametrize("measured", [False, True])
def test_an_autograd_function_that_is_handed_them_is_an_error_and_no_missing_gradient(measured):
    def loss(head, hidden, labels):
        logits = head(hidden)
        if measured:
            logits.detach()
        return OwnLoss.apply(logits, labels) + hidden.square().mean()

    model = kernelize(with_loss(loss), FUSED)
    with pytest.raises(RuntimeError, match="hands its logits to an autograd.Function.*leave 'fused_ce' out"):
        step(model)
    unkernelize(model)


def test_a_head_whose_input_changes_meanwhile():
    """The original says so in the backward."""

    def loss(head, hidden, labels):
        hidden = hidden * 1
        logits = head(hidden)
        hidden.mul_(2)
        return cross_entropy(logits, labels)

    model = kernelize(with_loss(loss), FUSED)
    with pytest.raises(RuntimeError, match="changed in place before its logits were needed"):
        step(model)
    unkernelize(model)


@dataclasses.dataclass(frozen=True)
class Outputs:
    loss: object
    logits: object


Pair = collections.namedtuple("Pair", "loss logits")
KINDS_OF_OUTPUTS = {
    "a namespace": lambda loss, logits: types.SimpleNamespace(loss=loss, logits=logits),
    "a dataclass": Outputs,
    "a named tuple": Pair,
    "a list": lambda loss, logits: [loss, logits],
    "numbered": lambda loss, logits: {0: loss, 1: logits},
    "nested": lambda loss, logits: (loss, {"of": [logits, (1, logits)]}),
    "nothing new": lambda loss, logits: {"loss": loss},
}


def pending_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(pending_in, value))
    return isinstance(value, PendingLogits) or any(map(pending_in, getattr(value, "__dict__", {}).values()))


@pytest.mark.parametrize("kind", KINDS_OF_OUTPUTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_none_gets_out_in_outputs_of_any_kind(kind, compiled):
    make = KINDS_OF_OUTPUTS[kind]

    def forward(self, *args, labels=None, **kwargs):
        logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
        return make(cross_entropy(logits, labels), logits)

    torch._dynamo.reset()
    model = build()
    model.__class__ = type("Own", (type(model),), {"forward": forward})
    kernelize(model, FUSED)
    outputs = (torch.compile(model, backend="eager") if compiled else model)(**presets.inputs(model))
    assert not pending_in(outputs) and type(outputs) is type(make(1, 2))
    unkernelize(model)
    torch._dynamo.reset()


def test_a_second_call_of_the_head_keeps_its_logits():
    def forward(self, *args, labels=None, **kwargs):
        hidden = self.model(*args, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        return {"loss": cross_entropy(logits, labels), "logits": logits, "further": self.lm_head(2 * hidden)}

    model = build()
    model.__class__ = type("Own", (type(model),), {"forward": forward})
    expected = model(**presets.inputs(model))["further"]
    kernelize(model, FUSED)
    outputs = model(**presets.inputs(model))
    assert outputs["logits"] is None and torch.equal(outputs["further"], expected)
    unkernelize(model)


# --- in which models, and how they are called -------------------------------------------------------------------------


def masked_lm():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.arange(3, 19).view(2, 8)
    return BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids.flip(-1)}


def test_a_masked_language_model_and_hooks_around_its_head():
    model, inputs = masked_lm()
    theirs = step(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(**inputs).loss
    kernelize(model, FUSED)
    assert_same(step(model, inputs), theirs)
    with torch.autocast("cpu", torch.bfloat16):  # its loss is made of bf16, and yet fp32
        torch.testing.assert_close(model(**inputs).loss, rounded, rtol=1e-5, atol=0)
    assert the_row(model).calls == 2
    seen = []
    with model.cls.register_forward_hook(lambda module, args, output: seen.append(output)):
        assert step(model, inputs)[0].logits is seen[0]
    with model.cls.register_full_backward_pre_hook(lambda module, grads: seen.append(grads[0])):
        assert step(model, inputs)[0].logits.shape == seen[1].shape
    assert the_row(model).fallbacks == {"a module around the head has hooks": 2}
    unkernelize(model)


def test_a_language_model_within_an_output():
    """BLIP-2 hands out all that its language model does."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    nothing_dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = OPTConfig(vocab_size=64, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, **sizes)
    config = Blip2Config(
        vision_config={**sizes, "intermediate_size": 32, "image_size": 8, "patch_size": 4},
        qformer_config={
            **sizes,
            "vocab_size": 64,
            "intermediate_size": 32,
            "encoder_hidden_size": 16,
            **nothing_dropped,
        },
        text_config=text.to_dict(),
        num_query_tokens=4,
        image_token_index=63,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).train()
    ids = torch.arange(3, 21).view(2, 9)
    labels = ids.clone()
    ids[:, 1:5] = 63
    inputs = {"input_ids": ids, "labels": labels, "pixel_values": torch.linspace(-1, 1, 384).view(2, 3, 8, 8)}
    theirs = step(model, inputs)
    kernelize(model, FUSED)
    ours = step(model, inputs)
    assert_same(ours, theirs)
    assert ours[0].logits is None and ours[0].language_model_outputs.logits is None and the_row(model).calls == 1
    unkernelize(model)


def test_what_transforms_functions_gets_logits():
    model = build()
    inputs, parameters = presets.inputs(model), dict(model.named_parameters())

    def loss(some):
        return torch.func.functional_call(model, some, (), inputs).loss

    theirs = torch.func.grad(loss)(parameters)
    kernelize(model, FUSED)
    for name, gradient in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(gradient, theirs[name])
    assert the_row(model).fallbacks == {"inside a functorch transform": 1}
    loss(parameters).backward()
    assert the_row(model).calls == 1
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)
    unkernelize(model)


def test_fp64_under_autocast_stays_so():
    model = build().double()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**presets.inputs(model)).loss
        kernelize(model, FUSED)
        assert torch.equal(model(**presets.inputs(model)).loss, expected)
    unkernelize(model)


def test_a_head_that_was_replaced_since():
    model = kernelize(build(), FUSED)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    assert step(model)[0].logits is not None
    assert list(the_row(model).fallbacks) == [
        "the head was not called as kernelize() had found it; was it replaced since?"
    ]
    unkernelize(model)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_after_an_error_in_a_model_nothing_is_left(kind):
    model = kernelize(build(), FUSED)

    def broken(**kwargs):
        raise kind

    model.loss_function = broken
    with pytest.raises(kind):
        model(**presets.inputs(model))
    assert isinstance(model.lm_head(torch.zeros(1, model.lm_head.in_features)), torch.Tensor)
    unkernelize(model)


def test_heads_are_let_go_of_without_a_garbage_collector(monkeypatch):
    heads = []
    monkeypatch.setattr(
        Head, "pending", lambda self, pending=Head.pending: heads.append(weakref.ref(self)) or pending(self)
    )
    for function in (cross_entropy, lambda logits, labels: cross_entropy(logits, labels) + logits.square().mean()):
        model = kernelize(with_loss(lambda head, x, labels, loss=function: loss(head(x), labels)), FUSED)
        gc.collect()
        gc.disable()
        try:
            outputs = model(**presets.inputs(model))
            assert [head() for head in heads] == [None] and outputs.loss.requires_grad
        finally:
            gc.enable()
        heads.clear()
        unkernelize(model)


class Special(torch.Tensor):
    """Somebody's tensor, e.g. a quantised one."""


def test_calls_of_a_head_that_are_left_to_it():
    head, x = nn.Linear(4, 7), torch.zeros(2, 4)
    assert _why_not(head, x) is None
    for weight, call, why in (
        (torch.zeros(7, 4), x.as_subclass(Special), "no plain tensor"),
        (torch.zeros(7, 4).as_subclass(Special), x, "no plain tensor"),
        (torch.empty(7, 4, device="meta"), x, "different devices"),
        (torch.zeros(7, 4).double(), x, "different dtypes"),
        (torch.empty(0, 4), x, "sharded and not gathered"),
    ):
        head.weight = nn.Parameter(weight)
        assert why in _why_not(head, call)
    with torch.no_grad():
        assert _why_not(nn.Linear(4, 7), x) == "the head is called without gradients"
