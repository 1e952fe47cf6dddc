"""What tests of the fused loss share: models without chance, a training step, and what is the same of two."""

from __future__ import annotations

import torch
from torch import nn

from twinkle import presets
from twinkle.kernel import KernelChoice
from twinkle.kernel.report import report

FUSED = {"fused_ce": KernelChoice("causal_lm_loss", ("torch",))}


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


def with_loss_layer(self, *args, labels=None, **kwargs):
    """The forward of a model that makes a loss layer of its own."""
    logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
    return nn.CrossEntropyLoss()(logits[..., :-1, :].reshape(-1, logits.size(-1)), labels[..., 1:].flatten()), logits
