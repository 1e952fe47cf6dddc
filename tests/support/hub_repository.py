"""A kernel repository of the layout that the package kernels loads, with layers and functions for Qwen3."""

from __future__ import annotations

import json
from pathlib import Path

from twinkle.kernel import hub
from twinkle.kernel.hub import HubRef

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
NORM, MLP, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3MLP.forward", f"{QWEN3}.apply_rotary_pos_emb"

LAYERS = """
import torch
import torch.nn.functional as F
from torch import nn

class RMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)

class RMSNormInference(RMSNorm):
    has_backward = False

    def forward(self, hidden_states):
        return RMSNorm.forward(self, hidden_states.detach())

class RMSNormEager(RMSNorm):
    can_torch_compile = False

class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

class WithInit(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, hidden_states):
        return hidden_states
"""
FUNCTIONS = """
from . import layers

VERSION = 3

def turn(x):
    import torch
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)

def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin

def swapped(q, k, sin, cos, unsqueeze_dim=1):
    raise AssertionError("called")

def raising(q, k, cos, sin, unsqueeze_dim=1):
    raise RuntimeError("no kernel image")

def inference_only(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_transformers(q.detach(), k.detach(), cos, sin, unsqueeze_dim)

inference_only.has_backward = False
"""


def write_kernel(folder: Path, name: str) -> Path:
    """One build variant of a kernel repository, for a CPU."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FUNCTIONS)
    (folder / "layers.py").write_text(LAYERS)
    metadata = {"id": name, "name": "toy-kernels", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (folder / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))
    return folder


def toy(name: str) -> HubRef:
    return hub("me/toy", name, version=1)
