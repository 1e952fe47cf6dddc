"""The op ``relu_squared``: its reference, by which places are recognised and kernels judged, and a layer for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.probe import agree, stand_in
from twinkle.reasons import Reason


@dataclass(frozen=True)
class Variant:
    """What a place computes, as far as places differ: here they don't."""


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """The maths in the plainest form."""
    return torch.relu(x).square()


def numbers(*shape: int) -> torch.Tensor:
    """The same at each call, and without a trace in anybody's random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def probe(site: Any) -> Variant | Reason:
    """Runs the place's own code on a small input. Its class may have any name."""
    x = numbers(4, 16)
    if agree(site.original(stand_in(site.module), x.clone()), relu_squared(x)):
        return Variant()
    return Reason("not-this-op", f"{site.owner.__qualname__} computes something else than relu(x)^2")


def build(variant: Variant, compute_dtype: torch.dtype = torch.float32) -> type[nn.Module]:
    """The maths as a layer; in float64 it is the judge."""

    class ReferenceReLUSquared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return relu_squared(x.to(compute_dtype)).to(x.dtype)

    return ReferenceReLUSquared


def example(site: Any, variant: Variant) -> Example:
    """Small inputs to compare a kernel and the original on."""
    return Example(stand_in(site.module), (numbers(2, 5, 16),))


def places() -> list[tuple[nn.Module, tuple[str, ...]]]:
    """A model with such a place, for ``twinkle-kernel verify --op relu_squared``."""
    from transformers.activations import ReLUSquaredActivation

    return [(nn.Sequential(ReLUSquaredActivation()), ("transformers.activations.ReLUSquaredActivation",))]


class MyReLUSquared(nn.Module):
    """The backend's layer: one product instead of a square."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x * max(x, 0)``; any shape."""
        return x * x.clamp(min=0)
