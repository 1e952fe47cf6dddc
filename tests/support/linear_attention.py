"""A stand-in for flash-linear-attention: its functions' parameters, by PyTorch, or failing as without a GPU."""

from __future__ import annotations

from pathlib import Path

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
