"""Op ``causal_lm_loss``: a language model's head and cross-entropy in one, so that its logits never exist at once.

Opt-in, under the logical key ``'fused_ce'``: in training a model called with labels returns no logits then. A model
that hands its logits to an ``autograd.Function`` of its own, or to TorchScript, raises an error with it.
"""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import, register_op

_HERE = "twinkle.kernel.ops.causal_lm_loss"

register_op(
    "causal_lm_loss",
    implementations={
        "triton": KernelImpl(
            lazy_import(f"{_HERE}.ours:load_triton"), lazy_import("twinkle.kernel.ops.triton_support:available")
        ),
        "liger": KernelImpl(lazy_import(f"{_HERE}.liger:load"), lazy_import(f"{_HERE}.liger:available")),
        "torch": KernelImpl(lazy_import(f"{_HERE}.ours:load_torch"), lambda: (True, None)),
    },
    installer=lazy_import(f"{_HERE}.installer:install"),
    scope="model",
    reference=f"{_HERE}.reference",
)
