"""The ``npu`` backend of ``swiglu`` and ``geglu``: activation and product by one function of torch_npu each way.

The functions read gate and up as the two halves of one tensor. A fused gate-and-up projection is that tensor; where
there are two projections, their outputs are copied into one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.ops.glu.reference import ACTIVATIONS, gate_up_of
from twinkle.kernel.ops.npu_support import call_reason, npu_function
from twinkle.kernel.probe import random_tensor

if TYPE_CHECKING:
    from twinkle.kernel.ops.glu.reference import GluVariant
    from twinkle.kernel.targets import Site

available_silu = functools.partial(npu_support.available, {"npu_swiglu": ("dim",), "npu_swiglu_backward": ("dim",)})
_GEGLU = ("dim", "approximate", "activate_left")
available_gelu = functools.partial(npu_support.available, {"npu_geglu": _GEGLU, "npu_geglu_grad": _GEGLU})

_APPROXIMATE = {"gelu": 0, "gelu_tanh": 1}


class SwiGLU(torch.autograd.Function):
    """``silu(a) * b`` of ``[a, b]``, shape ``[..., 2 I]``."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return npu_function("npu_swiglu")(gate_up, dim=-1)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return npu_function("npu_swiglu_backward")(grad, *saved_tensors(ctx, "swiglu by npu"), dim=-1)  # type: ignore[no-any-return]


class GeGLU(torch.autograd.Function):
    """``gelu(a) * b`` of ``[a, b]``; ``options`` say which GELU, and that a is what is activated."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        result, gelu = npu_function("npu_geglu")(gate_up, dim=-1, **options)
        ctx.save_for_backward(gate_up, gelu)
        ctx.options = options
        return result  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return npu_function("npu_geglu_grad")(grad, *saved_tensors(ctx, "geglu by npu"), dim=-1, **ctx.options), None


def geglu_options(activation: str, device: torch.device) -> dict[str, Any]:
    """What makes ``npu_geglu`` activate the first half.

    Its parameter says left or right, and which half is which isn't published: a small input shows it.

    Raises:
        RuntimeError: neither gives the product.
    """
    halves = random_tensor(2, 32, seed=1)
    gate, up = halves.chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    for activate_left in (True, False):
        options = {"approximate": _APPROXIMATE[activation], "activate_left": activate_left}
        result = npu_function("npu_geglu")(halves.to(device), dim=-1, **options)[0]
        if torch.allclose(result.cpu(), expected, rtol=1e-3, atol=1e-3):
            return options
    raise RuntimeError(f"npu_geglu computes neither {activation}(a) * b nor {activation}(b) * a of [a, b]")


def product_of(activation: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of ``[..., 2 I]``, gate first, to the product ``[..., I]``."""
    if activation == "silu":
        return SwiGLU.apply  # type: ignore[no-any-return]
    options = geglu_options(activation, device)
    return lambda gate_up: GeGLU.apply(gate_up, options)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class for one variant. The projections run as they are; should they return what the function can't take
    (another dtype for gate than for up, say), the activation and product run eagerly."""
    variant: GluVariant = site.variant
    product, eager = product_of(variant.activation, site.device), ACTIVATIONS[variant.activation]
    *first, down = variant.projections

    if len(first) == 1:

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate_up = getattr(self, first[0])(x)
            if call_reason(gate_up) is None and gate_up.shape[-1] % 2 == 0:
                return getattr(self, down)(product(gate_up))
            gate, up = gate_up.chunk(2, dim=-1)
            return getattr(self, down)(eager(gate) * up)

    else:
        both = gate_up_of(variant)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate, up = both(self, x)
            if call_reason(gate, up) is None and gate.shape == up.shape:
                return getattr(self, down)(product(torch.cat((gate, up), dim=-1)))
            return getattr(self, down)(eager(gate) * up)

    def accepts_call(self: Any, x: torch.Tensor) -> str | None:
        return call_reason(x) or ("more than 8 dimensions" if x.dim() > 8 else None)

    return layer("NpuGLU", forward, accepts_call)
