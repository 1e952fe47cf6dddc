"""A model that no default entry knows: its own RMSNorm, gated MLP and rotary function, and some things beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HEADS, HEAD, HIDDEN, INTERMEDIATE = 2, 16, 32, 48

apply_rotary_from_elsewhere = None  # what files hold when an optional package is missing
apply_rotary_of_torch = F.silu  # belongs to torch, whatever it is called here


class ToyNorm(nn.Module):
    """An RMSNorm as Gemma computes it, under another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width) * 0.1)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.scale.float())).to(x.dtype)


class ToyMLP(nn.Module):
    """A gated MLP as Llama computes it, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False), nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.w2 = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OddNorm(nn.Module):
    """A norm that no op computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.abs().amax(-1, keepdim=True)


def turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rope(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Rotary position embedding as Llama computes it, under another name."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


class ToyAttention(nn.Module):
    """Attention that calls the rotary function as a global of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3 * HEADS, HEAD).transpose(1, 2).chunk(3, dim=1)
        angles = torch.arange(length, dtype=x.dtype)[None, :, None] * torch.linspace(1, 0.1, HEAD // 2, dtype=x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        q, k = apply_rope(q, k, angles.cos(), angles.sin())
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class ToyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = ToyNorm(HIDDEN), ToyNorm(HIDDEN)
        self.attention, self.mlp = ToyAttention(), ToyMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ToyModel(nn.Module):
    """Two layers and a last norm of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyLayer() for _ in range(2))
        self.last_norm = OddNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last_norm(x)


class Outer:
    """A namespace."""

    class InnerNorm(ToyNorm):
        """A class within a class, with the forward of its base."""


class OverridingNorm(ToyNorm):
    """A subclass with code of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class WithKeywords(nn.Module):
    """A layer whose forward takes more than tensors."""

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, shift: float = 0.0, **kwargs: float) -> torch.Tensor:
        return x * scale + shift + sum(kwargs.values())


def toy(seed: int = 0) -> ToyModel:
    """A toy model with weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyModel().eval()


def toy_input() -> torch.Tensor:
    """[2, 5, HIDDEN] fp32."""
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
