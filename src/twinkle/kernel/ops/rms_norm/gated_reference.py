"""The gated RMSNorm of gated delta-net layers (Qwen3-Next, Qwen3.5): normalise, scale, then gate in fp32.

``cast((w * cast(h)) * silu(gate))`` with ``h = x * rsqrt(mean(x^2) + eps)`` in fp32; the weight has no ``1 +``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.ops.rms_norm.reference import PROBES, eps_name, rms_norm, weight_name, width_of
from twinkle.kernel.probe import WIDTH, agree, probed, random_tensor, stand_in, uneven
from twinkle.kernel.probe import cast as cast_stand_in
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


@dataclasses.dataclass(frozen=True)
class GatedRMSNormVariant:
    """The attribute names of a gated RMSNorm's weight and eps."""

    weight: str
    eps: str


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """RMSNorm over the last dimension, times ``silu(gate)``.

    Args:
        x: ``[..., H]``, floating.
        gate: ``[..., H]``; None leaves the gate out.
        weight: ``[H]``.
        eps: added to the mean of squares.
        compute_dtype: what the statistics and the gate are computed in.

    Returns:
        ``[..., H]`` in ``x``'s dtype.
    """
    normed = rms_norm(x, weight, eps, cast="before", compute_dtype=compute_dtype)
    if gate is None:
        return normed
    return (normed * F.silu(gate.to(compute_dtype))).to(x.dtype)


@probed("gated_rms_norm")
def probe(site: Site) -> GatedRMSNormVariant | Reason:
    """Runs the instance's own forward on small inputs and compares it with the reference."""
    assert site.module is not None
    weight, eps = weight_name(site.module), eps_name(site.module)
    if weight is None or eps is None:
        return Reason("not-this-op", f"{site.owner.__qualname__} has no single 1-D weight or no eps")
    variant = GatedRMSNormVariant(weight, eps)
    if all(_matches(site, variant, *probe_) for probe_ in PROBES):
        return variant
    return Reason("not-this-op", f"{site.owner.__qualname__} computes no norm-then-SiLU-gate in fp32")


def _matches(
    site: Site, variant: GatedRMSNormVariant, x_dtype: Any, weight_dtype: Any, leading: tuple[int, ...], training: bool
) -> bool:
    assert site.module is not None
    twin = cast_stand_in(stand_in(site.module, training=training), weight_dtype)
    x, gate = (uneven(*leading, WIDTH, seed=seed).to(x_dtype) for seed in (7, 5))
    weight, eps = twin._parameters[variant.weight], getattr(twin, variant.eps)
    if not agree(site.original(twin, x.clone(), gate.clone()), gated_rms_norm(x, gate, weight, eps), mismatches=0.02):
        return False
    try:
        without = site.original(twin, x.clone(), None)
    except Exception:  # it needs a gate
        return True
    return agree(without, gated_rms_norm(x, None, weight, eps), mismatches=0.02)


def build(variant: GatedRMSNormVariant, compute_dtype: torch.dtype = torch.float32) -> type[nn.Module]:
    """The maths as a layer class."""

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight, eps = getattr(self, variant.weight), getattr(self, variant.eps)
        return gated_rms_norm(hidden_states, gate, weight, eps, compute_dtype=compute_dtype)

    return layer("ReferenceGatedRMSNorm", forward)


def example(site: Site, variant: GatedRMSNormVariant) -> Example:
    """Rows as wide as the instance's weight, and a gate."""
    assert site.module is not None
    width = width_of(site.module, variant.weight)
    args = (random_tensor(6, width, seed=3), random_tensor(6, width, seed=4))
    return Example(stand_in(site.module, width=width), args)
