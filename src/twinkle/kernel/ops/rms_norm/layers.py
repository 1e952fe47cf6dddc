"""The layer classes of both ops, of two functions that each backend has: one computes, one says why it can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.derived import layer

if TYPE_CHECKING:
    from twinkle.kernel.ops.rms_norm.gated_reference import GatedRMSNormVariant
    from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant

Norm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, float, str], torch.Tensor]
"""``(x, weight, gate, eps, offset, cast) -> y``; weight and gate are None where there are none."""

CallReason = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], str | None]
"""``(x, weight, gate)`` -> why a call can't be served, or None."""


def weight_of(module: Any, name: str | None) -> torch.Tensor | None:
    """A norm's weight. A parametrised module, or one of a tool that flattens parameters, has no parameter of that name,
    but an attribute."""
    if name is None:
        return None
    try:
        return module._parameters[name]  # type: ignore[no-any-return]  # quicker than nn.Module's own way
    except KeyError:
        return getattr(module, name)  # type: ignore[no-any-return]


def norm_layer(name: str, variant: RMSNormVariant, norm: Norm, reason: CallReason) -> type[nn.Module]:
    """The layer class of one variant."""
    weight_name, eps_name, offset, cast = variant.weight, variant.eps, variant.offset, variant.cast

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return norm(hidden_states, weight_of(self, weight_name), None, getattr(self, eps_name), offset, cast)

    def accepts_call(self: Any, hidden_states: torch.Tensor) -> str | None:
        return reason(hidden_states, weight_of(self, weight_name), None)

    return layer(name, forward, accepts_call)


def gated_norm_layer(name: str, variant: GatedRMSNormVariant, norm: Norm, reason: CallReason) -> type[nn.Module]:
    """The layer class of the gated norm."""
    weight_name, eps_name = variant.weight, variant.eps

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return norm(hidden_states, weight_of(self, weight_name), gate, getattr(self, eps_name), 0.0, "before")

    def accepts_call(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> str | None:
        return reason(hidden_states, weight_of(self, weight_name), gate)

    return layer(name, forward, accepts_call)
