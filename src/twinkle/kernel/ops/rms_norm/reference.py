"""RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467) and how to recognise it.

With ``h = x * rsqrt(mean(x^2) + eps)`` in fp32, models compute one of four things, by ``offset`` and ``cast``:

======== ====== ============================================ ===========================================
cast     offset result                                       seen in
======== ====== ============================================ ===========================================
before   0      ``w * cast(h)``; an fp32 weight promotes     Llama, Mistral, Qwen2, Qwen3, Phi-3, GLM-4 …
after    0      ``cast(w * h)``                              OLMo 2, gpt-oss, Gemma 4
after    1      ``cast((1 + w) * h)``                        Gemma 1-3, Qwen3-Next, Qwen3.5
factor   0      ``x * cast(rsqrt(…))``                       DeepSeek-V4's norm without weight
======== ====== ============================================ ===========================================
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.probe import WIDTH, agree, probed, random_tensor, shape_of, stand_in, uneven
from twinkle.kernel.probe import cast as cast_stand_in
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

Cast = Literal["before", "after", "factor"]
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclasses.dataclass(frozen=True)
class RMSNormVariant:
    """What an RMSNorm instance computes.

    Attributes:
        offset: added to the weight: 0 or 1.
        cast: where the result of the normalisation is cast to the input's dtype; see the module's table.
        weight: the weight's attribute name; None for a norm without weight.
        eps: the attribute name of eps.
    """

    offset: float
    cast: Cast
    weight: str | None
    eps: str


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before",
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: ``[..., H]``, floating.
        weight: ``[H]``, or None.
        eps: added to the mean of squares.
        offset: added to the weight, in ``compute_dtype``.
        cast: see the module's table.
        compute_dtype: what the statistics are computed in; with fp64 nothing is rounded to a narrower dtype.

    Returns:
        ``[..., H]`` in ``x``'s dtype; in the promoted dtype for ``cast="before"`` with a wider weight.
    """
    if weight is not None:
        for size in x.shape[:-1]:
            # Spread over one dimension after the other, the weight's gradient is summed over one after the other: where
            # a compiler adds up one by one, in a fraction of the additions, and with as much less rounding.
            weight = weight.unsqueeze(-2).expand(*weight.shape[:-1], size, weight.shape[-1])
    wide = x.to(compute_dtype)
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "factor":
        h = x * factor.to(x.dtype)
        return h if weight is None else h * (offset + weight).to(x.dtype)
    h = wide * factor
    if weight is None:
        return h.to(x.dtype)
    if cast == "before":
        return (offset + weight if offset else weight) * h.to(x.dtype)
    return (h * (offset + weight.to(compute_dtype))).to(x.dtype)


def eps_name(module: nn.Module) -> str | None:
    """The attribute that holds eps; 0.0 is a value."""
    return next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def weight_name(module: nn.Module) -> str | None:
    """The only 1-D parameter's name, or None."""
    names = [name for name, p in module._parameters.items() if p is not None and len(shape_of(p)) == 1]
    return names[0] if len(names) == 1 else None


PROBES = (
    (torch.float32, torch.float32, (64,), True),  # the maths itself
    (torch.bfloat16, torch.bfloat16, (8, 8), False),  # the order of rounding
    (torch.bfloat16, torch.float32, (4, 4, 4), True),  # the promotion
)
"""What a probe runs: the dtypes of input and weight, the input's leading dimensions, whether in training mode."""


@probed("rms_norm")
def probe(site: Site) -> RMSNormVariant | Reason:
    """Runs the instance's own forward on small inputs and compares it with each variant, bit for bit up to rounding."""
    assert site.module is not None
    if site.module._modules and any(child is not None for child in site.module._modules.values()):
        return Reason("not-this-op", f"{site.owner.__qualname__} has children, an RMSNorm has none")
    eps = eps_name(site.module)
    if eps is None:
        return Reason("not-this-op", f"{site.owner.__qualname__} has no eps ({', '.join(EPS_NAMES)})")
    name = weight_name(site.module)
    fitting = [v for v in _variants(name, eps) if _matches(site, v)]
    if not fitting:
        return Reason("not-this-op", f"{site.owner.__qualname__} computes none of the known RMSNorm variants")
    return fitting[0]


def _variants(weight: str | None, eps: str) -> list[RMSNormVariant]:
    if weight is None:
        return [RMSNormVariant(0.0, cast, None, eps) for cast in ("after", "factor")]
    return [RMSNormVariant(*kind, weight, eps) for kind in ((0.0, "before"), (0.0, "after"), (1.0, "after"))]


def _matches(site: Site, variant: RMSNormVariant) -> bool:
    assert site.module is not None
    for x_dtype, weight_dtype, leading, training in PROBES:
        twin = cast_stand_in(stand_in(site.module, training=training), weight_dtype)
        x = uneven(*leading, WIDTH, seed=7).to(x_dtype)
        weight = twin._parameters[variant.weight] if variant.weight else None
        expected = rms_norm(x, weight, getattr(twin, variant.eps), offset=variant.offset, cast=variant.cast)
        if not agree(site.original(twin, x.clone()), expected, mismatches=0.02):
            return False
    return True


def build(variant: RMSNormVariant, compute_dtype: torch.dtype = torch.float32) -> type[nn.Module]:
    """The maths as a layer class."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, variant.weight) if variant.weight else None
        eps = getattr(self, variant.eps)
        return rms_norm(
            hidden_states, weight, eps, offset=variant.offset, cast=variant.cast, compute_dtype=compute_dtype
        )

    return layer("ReferenceRMSNorm", forward)


def example(site: Site, variant: RMSNormVariant) -> Example:
    """Rows as wide as the instance's weight (64 without one)."""
    assert site.module is not None
    width = width_of(site.module, variant.weight)
    return Example(stand_in(site.module, width=width), (random_tensor(2, 5, width, seed=3),))


def width_of(module: nn.Module, weight: str | None) -> int:
    """The weight's length; 64 without one, or where it can't be seen."""
    parameter = module._parameters[weight] if weight else None
    return (0 if parameter is None else shape_of(parameter).numel()) or 64
