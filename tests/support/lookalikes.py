"""Modules and functions that compute on ordinary inputs what an op computes, and something else beyond."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16


class Norm(nn.Module):
    """An RMSNorm as Llama computes it: no lookalike, but what the others are like."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalised(x, -1)

    def normalised(self, x: torch.Tensor, dims: Any) -> torch.Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(dims, keepdim=True) + self.eps)).to(x.dtype)


class WithGain(Norm):
    """A trained scale that starts as one."""

    def __init__(self, shape: tuple[int, ...] = (), trained: bool = True) -> None:
        super().__init__()
        gain = torch.ones(shape)
        if trained:
            self.gain = nn.Parameter(gain)
        else:
            self.register_buffer("gain", gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class OverDims(Norm):
    """Normalises other dimensions: the channels of images, or all but the batch."""

    def __init__(self, dims: Any) -> None:
        super().__init__()
        self.dims = dims
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalised(x, self.dims if isinstance(self.dims, int) else tuple(range(1, x.dim())))


class OverGroups(Norm):
    """Normalises groups of eight channels."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalised(x.unflatten(-1, (-1, 8)), -1).flatten(-2)


class OtherwiseInTraining(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.5 if self.training else 1.0)


class OtherwiseInEvaluation(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.training else 1.5)


class OtherwiseForHeads(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.dim() < 4 else x


class ClampedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-100, 100))


class GatedNorm(Norm):
    """A gated RMSNorm as Qwen3-Next computes it; without a gate it scales nothing."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        if gate is None:
            return self.normalised(x, -1)
        return (super().forward(x) * F.silu(gate.float())).to(x.dtype)


class MLP(nn.Module):
    """A gated MLP as Llama computes it, whose activation is a private attribute."""

    def __init__(self, activation: Any = F.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down_proj = nn.Linear(24, WIDTH)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class MLPWithGain(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class MLPWithSettings(MLP):
    """Scaled by what an object says that all instances of the class may have their own of."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._settings = SimpleNamespace(scale=scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._settings.scale


class ClampedMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=50), self.up_proj(x).clamp(-50, 50)
        return self.down_proj(F.silu(gate) * up)


class MLPOtherwiseInEvaluation(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.training else 1.5)


class MLPOtherwiseForBatches(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.dim() == 2 else 1.5)


class MLPWithBoundedActivation(MLP):
    """The activation is a child with a buffer."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bound", torch.tensor(1e9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(x).minimum(self.bound)

    def __init__(self) -> None:
        super().__init__(self.Bounded())


class Experts(nn.Module):
    """Stacked experts as transformers has them, whose gate is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 48, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(4, WIDTH, 24))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            share = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            gate, up = F.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, dim=-1)
            result += share * F.linear(self.product(gate, up), self.down_proj[expert])
        return result

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class ClampedExperts(Experts):
    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().product(gate.clamp(max=100), up)


class Attention(nn.Module):
    """What calls the functions below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Rotary position embedding as Llama computes it: no lookalike."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def rope_with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Looks positions up in the tables when it is given any."""
    if position_ids is not None:
        cos, sin = cos[:, position_ids[0]], sin[:, position_ids[0]]
    return rope(q, k, cos, sin, unsqueeze_dim)


def rope_of_one_layout(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Has a parameter that it doesn't look at."""
    return rope(q, k, cos, sin)


def rope_for_grouped_heads(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Scales the key by what it has fewer heads than the query."""
    q, k = rope(q, k, cos, sin, unsqueeze_dim)
    return q, k * (q.shape[unsqueeze_dim] // k.shape[unsqueeze_dim])
