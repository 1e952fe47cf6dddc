"""What tests of gated delta-nets share: inputs, a model, and a stand-in for flash-linear-attention.

Its functions have the library's parameters and are by PyTorch, or fail as the library's do without a GPU, or in fp64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from twinkle import presets

RULES = """
import torch

from twinkle.kernel.ops.fla import reference

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, chunk_size=64):
    {body}
    assert scale is None
    return reference.chunked(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)

def fused_recurrent_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None,
                                     output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    {body}
    assert not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, beta))), "it has no backward"
    return reference.recurrent(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
"""

CONVOLUTION = """
from twinkle.kernel.ops.fla import reference

def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
                  activation=None, cu_seqlens=None):
    {body}
    assert x.is_contiguous()
    return reference.causal_convolution(x.transpose(1, 2), weight, bias, activation, cu_seqlens).transpose(1, 2), None
"""


NO_DRIVER = "raise RuntimeError('0 active drivers ([]). There should only be one.')"
"""How its functions fail where there is no GPU."""
NO_FP64 = "assert 'torch.float64' not in [str(getattr(given, 'dtype', '')) for given in locals().values()], 'no fp64'"
"""And on a GPU, of numbers that Triton's products don't know there."""


def write_package(folder: Path, body: str = "pass", convolutions: str = "causal_conv1d") -> Path:
    """Makes a package ``fla`` in a folder that is to be on the path.

    Args:
        body: how its functions begin: :data:`NO_DRIVER`, :data:`NO_FP64`.
        convolutions: the module of the convolution; the library has moved it.
    """
    for package in ("fla", "fla/ops", "fla/modules"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").write_text("")
    (folder / "fla" / "ops" / "gated_delta_rule.py").write_text(RULES.format(body=body))
    (folder / "fla" / "modules" / f"{convolutions}.py").write_text(CONVOLUTION.format(body=body))
    return folder


def inputs(length: int, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Query, key, value, g, beta."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, 3, 16)] * 2 + [(batch, length, 3, 8)] + [(batch, length, 3)] * 2
    query, key, value, g, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    return [tensor.to(dtype) for tensor in (query, key, value, -g.abs(), beta.sigmoid())]


def with_gradients(function: Any, tensors: list[torch.Tensor], *rest: Any, **options: Any) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, state = function(*leaves, *rest, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)).sum()
    loss = loss + (0 if state is None else state.square().sum())
    return [out.detach(), *([] if state is None else [state.detach()]), *torch.autograd.grad(loss, leaves)]


def linear_model() -> Any:
    """No attention layers, in which documents are kept apart by masks."""
    return presets.build("qwen3_next", layer_types=["linear_attention"] * 2)


def second_document(model: Any, first: torch.Tensor) -> torch.Tensor:
    """The hidden states of a document of eight tokens behind another one."""
    device = next(model.parameters()).device
    ids = torch.cat((first, torch.arange(10, 18)))[None].to(device)
    bounds = torch.tensor([0, len(first), ids.shape[1]], dtype=torch.int32, device=device)
    positions = torch.cat((torch.arange(len(first)), torch.arange(8)))[None].to(device)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions, "use_cache": False}
    return model.model(input_ids=ids, **options).last_hidden_state[0, len(first) :]
