"""Op ``causal_lm_loss``: a language model's head and cross-entropy in one, so that its logits never exist at once.

Opt-in, under the logical key ``'fused_ce'``: in training a model called with labels returns no logits then. A model
that hands its logits to an ``autograd.Function`` of its own, or to TorchScript, raises an error with it.
"""

from __future__ import annotations

from twinkle.kernel.ops.backends import TRITON, backend
from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.causal_lm_loss"

register_op(
    "causal_lm_loss",
    implementations={
        "triton": backend(f"{_HERE}.ours", load="load_triton", available=TRITON, accepts=None),
        "liger": backend(f"{_HERE}.liger", accepts=None),
        "torch": KernelImpl(lazy_import(f"{_HERE}.ours:load_torch"), lambda: (True, None)),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    scope="model",
    reference=f"{_HERE}.reference",
)
