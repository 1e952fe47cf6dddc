"""Several gradients at once, under PyTorch's ``vmap``s, of models with kernels and without."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.config import OPT_IN_KERNEL_CONFIG
from twinkle.kernel.exact import by_pytorch_alone
from twinkle.kernel.report import report
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize


def assert_same_gradients(preset: str, backend: str, *ops: str, device: str | torch.device = "cpu") -> None:
    """Kernels of ``ops``, each of which must have been called, give what the original gives."""
    original = presets.build(preset).to(device).train()
    model = copy.deepcopy(original)
    choices = DEFAULT_KERNEL_CONFIG | OPT_IN_KERNEL_CONFIG
    of_ops = {key: c for key, c in choices.items() if isinstance(c, KernelChoice) and c.op in ops}
    kernelize(model, with_backends(of_ops, backend))
    with by_pytorch_alone(original):
        expected, found = _gradients(original), _gradients(model)
    assert {row.op for row in report(model).rows if row.state == "installed" and row.calls} == set(ops)
    unkernelize(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    inputs: dict[str, Any] = presets.inputs(model, batch=1, length=4, device=next(model.parameters()).device)
    wrt = [p for p in model.parameters() if p.requires_grad]
    losses = torch.stack([presets.loss(model(**inputs)), presets.loss(model(**inputs)) * 2])
    shares = torch.tensor([[1.0, 0.0], [0.5, -1.0], [0.0, 3.0]], device=losses.device)
    several = torch.autograd.grad(losses, wrt, shares, is_grads_batched=True, retain_graph=True, allow_unused=True)

    def one(share: torch.Tensor) -> Any:
        return torch.autograd.grad(losses, wrt, share, retain_graph=True, materialize_grads=True)

    by_transform = torch.func.vmap(one)(shares)
    return [grad for grads in (several, by_transform) for grad in grads if grad is not None]
