"""Sites of single layers and functions of transformers, and Liger's kernels for them, for the interpreter's tests."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from twinkle.kernel.registry import get_impl, get_op
from twinkle.kernel.targets import ModelIndex, Site, resolve_target

PATH = "transformers.models.{0}.modeling_{0}.{1}"


def _config(name: str, **settings: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    return getattr(transformers, name)(**{**sizes, **settings})


def make(family: str, name: str) -> nn.Module:
    """One layer of a family, with random weights."""
    cls = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    arguments = {
        "Qwen3MLP": lambda: (_config("Qwen3Config"),),
        "Phi3MLP": lambda: (_config("Phi3Config", pad_token_id=0),),
        "GemmaMLP": lambda: (_config("GemmaConfig", hidden_activation="gelu_pytorch_tanh"),),
        "Qwen3MoeExperts": lambda: (_config("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=48),),
        "Gemma4RMSNorm": lambda: (32, 1e-6, False),
        "DeepseekV4UnweightedRMSNorm": lambda: (1e-6,),
    }
    module = cls(*arguments.get(name, lambda: (32,))())
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return module


def site_of(op: str, family: str, name: str) -> Site:
    """The site of a layer, or of a function of the family's Python module, with what the op's probe finds there."""
    target = resolve_target(PATH.format(family, name))
    if target.kind == "function":
        owner, original, cpu = target.owner, target.original, torch.device("cpu")
        site = Site(None, target.label, owner, name, original, cpu, torch.float32)
    else:
        (site,) = ModelIndex.of(make(family, name.partition(".")[0]), None).sites(target)
    return dataclasses.replace(site, variant=get_op(op).load_reference().probe(site))


def load(op: str, site: Site) -> Any:
    """What Liger's backend loads for a site that it accepts."""
    impl = get_impl(op, "liger")
    assert impl.available() == (True, None)
    assert impl.accepts(site) is None
    return impl.load(None, site)


CASES: dict[str, tuple[str, str, str]] = {
    "norm, cast before the weight": ("rms_norm", "llama", "LlamaRMSNorm"),
    "norm, cast after the weight": ("rms_norm", "olmo2", "Olmo2RMSNorm"),
    "norm, 1 + w": ("rms_norm", "gemma", "GemmaRMSNorm"),
    "norm without weight": ("rms_norm", "gemma4", "Gemma4RMSNorm"),
    "norm, factor cast": ("rms_norm", "deepseek_v4", "DeepseekV4UnweightedRMSNorm"),
    "swiglu": ("swiglu", "qwen3", "Qwen3MLP.forward"),
    "swiglu, fused projection": ("swiglu", "phi3", "Phi3MLP.forward"),
    "geglu": ("geglu", "gemma", "GemmaMLP.forward"),
    "rotary": ("rotary", "qwen3", "apply_rotary_pos_emb"),
    "rotary, restoring": ("rotary", "olmo2", "apply_rotary_pos_emb"),
    "experts": ("moe_experts", "qwen3_moe", "Qwen3MoeExperts.forward"),
}
"""What it is -> op, family and name: every variant that Liger's backends serve."""
