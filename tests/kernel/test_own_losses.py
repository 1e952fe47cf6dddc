"""The fused loss next to a loss_function of the user's own: what can't be had without logits is refused, never lost."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import nn

from tests.support.fused_loss import FUSED, assert_same, build, step, the_row
from tests.support.models import clean_process  # noqa: F401
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.undo import unkernelize

REMEDY = "leave 'fused_ce' out for this model$"


def cross_entropy(logits, labels, vocab_size):
    return F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))


def with_loss(loss, name="qwen3"):
    model = build(name)
    model.loss_function = lambda logits, labels, vocab_size, **more: loss(logits, labels, vocab_size)
    return model


# --- their gradient ---------------------------------------------------------------------------------------------------

GRADIENTS = {
    "a hook": lambda logits, loss: logits.register_hook(lambda grad: grad * 10),
    "a hook of what was made of them": lambda logits, loss: logits.view(-1).register_hook(lambda grad: grad * 10),
    "a hook, by its class": lambda logits, loss: torch.Tensor.register_hook(logits, lambda grad: grad * 10),
    "a hook of several": lambda logits, loss: torch.autograd.graph.register_multi_grad_hook([logits], print),
    "kept": lambda logits, loss: logits.retain_grad(),
    "read": lambda logits, loss: logits.grad,
    "its function": lambda logits, loss: logits.grad_fn.next_functions,
    "computed": lambda logits, loss: torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True),
    "computed, of several": lambda logits, loss: torch.autograd.grad(loss, [logits, logits], allow_unused=True),
}


@pytest.mark.parametrize("asked", GRADIENTS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_their_gradient_after_the_loss_is_an_error_and_before_it_what_it_always_was(asked):
    ask = GRADIENTS[asked]

    def before(logits, labels, vocab_size):
        ask(logits, logits.float().square().mean())
        return cross_entropy(logits, labels, vocab_size)

    def after(logits, labels, vocab_size):
        logits = logits.float()
        loss = cross_entropy(logits, labels, vocab_size)
        ask(logits, loss)
        return loss

    model = with_loss(before)
    theirs = step(model)
    kernelize(model, FUSED)
    assert_same(step(model), theirs)
    unkernelize(model)
    if asked == "a hook of what was made of them":  # after the loss it is a tensor of its own, with a share in nothing
        return
    model = kernelize(with_loss(after), FUSED)
    with pytest.raises(RuntimeError, match=f"the logits' gradient is asked for .*{REMEDY}"):
        step(model)
    unkernelize(model)


def test_a_gradient_asked_for_when_the_model_has_returned():
    kept = []

    def loss(logits, labels, vocab_size):
        kept.append(logits)
        return cross_entropy(logits, labels, vocab_size)

    model = kernelize(with_loss(loss), FUSED)
    step(model)
    assert kept[0].detach().argmax(-1).shape == (2, 16)
    with pytest.raises(RuntimeError, match=REMEDY):
        _ = kept[0].grad
    unkernelize(model)


AFTERWARDS = {
    "measured": lambda logits, loss: loss + 0 * (logits.argmax(-1) == 3).float().mean(),
    "without gradients": lambda logits, loss: loss * logits.detach().softmax(-1).max(),
    "a penalty": lambda logits, loss: loss + 1e-2 * logits.logsumexp(-1).square().mean(),
    "a penalty on a part": lambda logits, loss: loss + logits.float()[:, -1].square().mean(),
    "a penalty by a function": lambda logits, loss: loss + F.mse_loss(logits, torch.zeros(logits.shape)),
    "a second loss": lambda logits, loss: loss + cross_entropy(logits * 2, torch.ones(2, 16, dtype=torch.long), 256),
    "in place": lambda logits, loss: loss + logits.float().mul_(2).square().mean(),
}


@pytest.mark.parametrize("use", AFTERWARDS)
def test_what_is_done_with_them_after_the_loss_counts(use):
    def loss(logits, labels, vocab_size):
        return AFTERWARDS[use](logits, cross_entropy(logits, labels, vocab_size))

    model = with_loss(loss)
    theirs = step(model)
    kernelize(model, FUSED)
    assert_same(step(model), theirs)
    assert the_row(model).calls == 1
    unkernelize(model)


# --- what they are ----------------------------------------------------------------------------------------------------


def of_tensors_only(logits, labels, vocab_size, **more):
    if isinstance(logits, torch.Tensor):
        return cross_entropy(logits, labels, vocab_size)
    return cross_entropy(logits[0] * 0, labels[0], vocab_size)


def asking_torch(logits, labels, vocab_size, **more):
    return cross_entropy(logits if torch.is_tensor(logits) else logits[:1] * 0, labels, vocab_size)


def asking_through_another(logits, labels, vocab_size, **more):
    return of_tensors_only(logits, labels, vocab_size)


def asking_inside(logits, labels, vocab_size, **more):
    return max((of_tensors_only(z, labels, vocab_size) for z in [logits]), key=lambda loss: isinstance(loss, nn.Module))


def asking_around(ask):
    return lambda logits, labels, vocab_size, **more: ask(logits, labels, vocab_size)


class Called:
    def __call__(self, logits, labels, vocab_size, **more):
        return of_tensors_only(logits, labels, vocab_size)


class Asking(nn.Module):
    def forward(self, logits, labels, vocab_size, **more):
        return of_tensors_only(logits, labels, vocab_size)


LOSSES_THAT_ASK = {
    "itself": of_tensors_only,
    "torch": asking_torch,
    "through another": asking_through_another,
    "inside": asking_inside,
    "around": asking_around(of_tensors_only),
    "partly applied": functools.partial(of_tensors_only),
    "an object": Called(),
    "a method": Called().__call__,
    "a module": asking_around(Asking()),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("asking", LOSSES_THAT_ASK)
def test_a_loss_that_asks_for_a_tensor_gets_one(asking, compiled):
    torch._dynamo.reset()
    model = build()
    model.loss_function = LOSSES_THAT_ASK[asking]
    theirs = step(model)
    kernelize(model, FUSED)
    ours = step(torch.compile(model, backend="eager") if compiled else model)
    torch.testing.assert_close(ours[0].loss, theirs[0].loss)
    torch.testing.assert_close(ours[0].logits, theirs[0].logits)
    if not compiled:
        assert the_row(model).calls == 0 and "whether something is a tensor" in str(the_row(model).fallbacks)
    unkernelize(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_that_does_not_ask_is_computed_without(compiled):
    def recursive(logits, labels, vocab_size, **more):
        return (
            recursive(logits, labels, vocab_size) if vocab_size is None else cross_entropy(logits, labels, vocab_size)
        )

    torch._dynamo.reset()
    model = build()
    model.loss_function = recursive
    theirs = step(model)
    kernelize(model, FUSED)
    ours = step(torch.compile(model, backend="eager", fullgraph=True) if compiled else model)
    assert ours[0].logits is None
    torch.testing.assert_close(ours[0].loss, theirs[0].loss)
    unkernelize(model)
    torch._dynamo.reset()


# --- errors of others -------------------------------------------------------------------------------------------------


def _of_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_a_scripted_loss_is_told_what_to_do():
    scripted = torch.jit.script(_of_scores)
    model = kernelize(with_loss(lambda logits, labels, vocab_size: scripted(logits, labels)), FUSED)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'") as raised:
        step(model)
    assert raised.value.__notes__ == ["its logits aren't computed yet; leave 'fused_ce' out for this model"]
    unkernelize(model)


def test_a_second_derivative_of_the_loss_is_told_what_to_do():
    model = kernelize(build(), FUSED)
    loss = model(**presets.inputs(model)).loss
    with pytest.raises(RuntimeError, match="can't be differentiated again.*leave 'fused_ce' out"):
        torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)
    unkernelize(model)
