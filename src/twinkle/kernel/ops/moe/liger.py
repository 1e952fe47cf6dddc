"""The ``liger`` backend of ``moe_experts``: all experts of a layer in grouped kernels. Opt-in, in no default chain.

Liger computes the weights' gradients even where they are frozen, and reads one count back to the host per forward.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.liger_support import call_reason, device_reason, differentiable_once, launch, liger_function
from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant, other_implementation
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

available = functools.partial(liger_support.available, ("LigerFusedMoEFunction",))

TUNING = "LIGER_FUSED_MOE_AUTOTUNE"
"""Liger's switch, read when it is imported: 0 pins one configuration of each kernel, otherwise it times dozens."""


def accepts(site: Site) -> Reason | None:
    """SiLU experts, on a device that Liger's kernels run on, when the user has decided about tuning."""
    variant: MoeExpertsVariant = site.variant
    if variant.gate.activation != "silu":
        return Reason("activation", f"the activation is {variant.gate.activation}, Liger's experts have silu")
    if not variant.plain:
        return Reason("variant", "Liger's experts have no clamped gate, no biases and weights of [E, 2 I, H] only")
    return device_reason(site) or _tuning_reason()


def _tuning_reason() -> Reason | None:
    """Why Liger's tuning stands in the way: it takes minutes at the first step, and can't be done when interpreted."""
    from triton.runtime.autotuner import Autotuner

    home = sys.modules[liger_function("LigerFusedMoEFunction").__module__]
    tuned = [kernel for kernel in vars(home).values() if isinstance(kernel, Autotuner)]
    if all(len(kernel.configs) == 1 for kernel in tuned):
        return None
    hint = f"set {TUNING}=0 before liger_kernel is imported"
    if liger_support.interpreted():
        return Reason("tuning", "Liger tunes its MoE kernels by timing them, which Triton's interpreter can't", hint)
    if TUNING in os.environ:
        return None
    count = sum(len(kernel.configs) for kernel in tuned)
    text = f"Liger would time {count} configurations of its MoE kernels at the first step, which takes minutes"
    return Reason("tuning", text, f"{hint}, or {TUNING}=1 to let it")


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class."""
    variant: MoeExpertsVariant = site.variant
    function = differentiable_once(liger_function("LigerFusedMoEFunction"))

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> torch.Tensor:
        # Under expert parallelism a slot may name no expert (an index of num_experts), where Liger would write out of
        # bounds. Telling whether one does would make the CPU wait for the GPU, so each such slot is given to expert 0
        # with weight 0: right, at the cost of its rows.
        nobody = (top_k_index < 0) | (top_k_index >= self.gate_up_proj.shape[0])
        index = top_k_index.masked_fill(nobody, 0).to(torch.int32)
        weights = top_k_weights.masked_fill(nobody, 0)
        return launch(function, hidden_states, self.gate_up_proj, self.down_proj, index, weights)

    def accepts_call(
        self: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None
    ) -> str | None:
        reason = other_implementation(self, variant)
        reason = reason or call_reason(hidden_states, top_k_weights, self.gate_up_proj, self.down_proj)
        if reason is not None:
            return reason
        if hidden_states.dim() != 2 or top_k_index.dim() != 2 or top_k_index.device != hidden_states.device:
            return "tokens of [tokens, hidden size] and indices of [tokens, chosen] on one device only"
        kind, dtype = hidden_states.device.type, hidden_states.dtype
        if dtype == torch.float32 and kind != "cpu":
            return "Liger's experts multiply fp32 in TF32"
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
            return "autocast would make the original multiply in another dtype"
        return None

    return layer("LigerMoeExperts", forward, accepts_call)
