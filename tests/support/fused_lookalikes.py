"""Attention modules and layers that do nearly what the fused norms are for, each in code of its own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.lookalikes import Norm
from tests.support.toys import apply_rope

HEADS, HEAD = 3, 16
WIDTH = HEADS * HEAD

rotate = apply_rope


def rotate_pairs(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Interleaved instead of half-split."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        quarter = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        c, s = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
        return x * c + quarter * s

    return turned(q), turned(k)


class Attention(nn.Module):
    """What the kernel is for: no lookalike, but what the others are like."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = Norm(), Norm()
        self.asks = True

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v)


class NormsUnderACondition(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        if self.asks:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return q, k


class RotationUnderACondition(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        if self.asks:
            q, k = rotate(q, k, cos, sin)
        return q, k


class KeysAreReadBetween(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2) + k
        q, k = rotate(q, k, cos, sin)
        return q, k, v


class QueriesMakeKeys(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(q.transpose(1, 2)).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return q, k


class WritesInPlaceBetween(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        raw = self.q_proj(x)
        q = self.q_norm(raw.view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        raw = raw.detach().zero_()
        q, k = rotate(q, k, cos, sin)
        return q, k


class WritesInPlaceByAnArgument(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        raw = self.q_proj(x)
        q = self.q_norm(raw.view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        raw = F.relu(raw, inplace=True)
        q, k = rotate(q, k, cos, sin)
        return q, k


class IsSomebodyElseBetween(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        self = copy.deepcopy(self)
        q, k = rotate(q, k, cos, sin)
        return q, k


class AFunctionReadsQueries(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        read = lambda: q  # noqa: E731
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        normed = read()
        q, k = rotate(q, k, cos, sin)
        return q, k, normed


class NormsAfterTheRotation(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q, k = self.q_proj(x).view(shape).transpose(1, 2), self.k_proj(x).view(shape).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        q, k = self.q_norm(q), self.k_norm(k)
        return q, k


class OtherDimensionsMove(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, -2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, -2)
        q, k = rotate(q, k, cos, sin)
        return q, k


class HeadsStayLast(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape))
        k = self.k_norm(self.k_proj(x).view(shape))
        q, k = rotate(q, k, cos, sin, unsqueeze_dim=2)
        return q, k


class PairsRotate(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = rotate_pairs(q, k, cos, sin)
        return q, k


class LayerNormsInstead(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)  # type: ignore[assignment]


class TwoKinds(Attention):
    """Queries by ``1 + w``, which is another kind of norm."""

    def __init__(self) -> None:
        super().__init__()
        from tests.support.toys import ToyNorm

        self.q_norm = ToyNorm(HEAD)  # type: ignore[assignment]


class CallsSuper(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return super().forward(2 * x, cos, sin)


class SaysThatItWraps(Attention):
    """What it says that it wraps is the code that the kernel is for, but nobody calls that."""

    @functools.wraps(Attention.forward)
    def forward(self, *args: Any) -> Any:
        shape = (*args[0].shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(args[0]).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(args[0]).view(shape)).transpose(1, 2)
        q, k = rotate(q, k, *args[1:])
        return q, k


class PrivateNames(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return self.__both(q, k)

    def __both(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        return q, k


class PrivateFunction(Attention):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1, HEAD)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        return __doubled(q), k  # type: ignore[name-defined]  # noqa: F821


def _PrivateFunction__doubled(q: torch.Tensor) -> torch.Tensor:
    return 2 * q


class CalledInAWayOfItsOwn(Norm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)  # type: ignore[no-any-return]


class NormsDoMore(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = CalledInAWayOfItsOwn()


class Layer(nn.Module):
    """What the other kernel is for."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), Norm()

    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        residual = x
        x = residual + scale * self.mixer(x)
        residual = x
        x = self.norm(x)
        return residual + self.mlp(x)


def renames(function: Any) -> Any:
    """Takes an argument by an old name too, as transformers' ``deprecate_kwarg``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "old" in kwargs:
            kwargs["x"] = kwargs.pop("old")
        return function(*args, **kwargs)

    return call


def acts_outermost(function: Any) -> Any:
    """Does something only where it is its class's forward, as transformers' checkpointing does."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.acted += type(self).forward is call
        return function(self, *args, **kwargs)

    return call


class DecoratedLayer(Layer):
    """For which the kernel is as well."""

    acted = 0

    @acts_outermost
    @renames
    def forward(self, x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        residual = x
        x = residual + scale * self.mixer(x)
        residual = x
        x = self.norm(x)
        return residual + self.mlp(x)


class NormOfTheSummand(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.norm(self.mixer(x))
        x = residual + x
        residual = x
        return residual + self.mlp(x)


class SomethingBetween(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = residual + self.mixer(x)
        x = x.clamp(-1, 1)
        residual = x
        x = self.norm(x)
        return residual + self.mlp(x)


class Subtracts(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = residual - self.mixer(x)
        residual = x
        x = self.norm(x)
        return residual + self.mlp(x)


class NormGoesElsewhere(Layer):
    """The name of the sum goes on meaning the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = residual + self.mixer(x)
        residual = x
        normed = self.norm(x)
        return x + self.mlp(normed)


class NormOfTheResidual(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = residual + self.mixer(x)
        residual = 2 * x
        x = self.norm(x)
        return residual + self.mlp(x)


ATTENTIONS = {
    NormsUnderACondition: "without a condition",
    RotationUnderACondition: "in one unconditional call",
    KeysAreReadBetween: "before it rotates them",
    QueriesMakeKeys: "before it rotates them",
    WritesInPlaceBetween: "more than plain assignments",
    WritesInPlaceByAnArgument: "more than plain assignments",
    IsSomebodyElseBetween: "more than plain assignments",
    AFunctionReadsQueries: "a function in its forward",
    NormsAfterTheRotation: "normalise queries and keys by head",
    OtherDimensionsMove: "normalise queries and keys by head",
    HeadsStayLast: "in one unconditional call",
    PairsRotate: "isn't the half-split one",
    LayerNormsInstead: "q_norm is no RMSNorm that is known",
    TwoKinds: "of two kinds",
    CallsSuper: "calls super",
    SaysThatItWraps: "in one unconditional call",
    PrivateNames: "private names",
    PrivateFunction: "private names",
    NormsDoMore: "called in a way of its own",
}
"""Lookalike -> why it is refused."""

LAYERS = (NormOfTheSummand, SomethingBetween, Subtracts, NormGoesElsewhere, NormOfTheResidual)


def attention_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(1, 5, HEAD // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
    return x, angles.cos(), angles.sin()
