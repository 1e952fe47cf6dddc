"""The ``liger`` backend of ``swiglu`` and ``geglu``: activation and product in one kernel, between the projections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.glu.reference import ACTIVATIONS, glu_layer
from twinkle.kernel.ops.liger_support import (
    WIDEST,
    call_reason,
    device_reason,
    differentiable_once,
    launch,
    liger_function,
)
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.ops.glu.reference import GluVariant
    from twinkle.kernel.targets import Site

# activation -> Liger's forward and backward. Exact GELU has none: Liger's GELU is the tanh approximation.
_KERNELS = {
    "silu": ("swiglu_forward", "swiglu_backward"),
    "gelu_tanh": ("geglu_forward", "geglu_backward"),
}

available_silu = functools.partial(liger_support.available, _KERNELS["silu"])
available_gelu = functools.partial(liger_support.available, _KERNELS["gelu_tanh"])


def accepts(site: Site) -> Reason | None:
    """SiLU and tanh-GELU, rows not too wide, on a device that Liger's kernels run on."""
    variant: GluVariant = site.variant
    if variant.activation not in _KERNELS:
        return Reason("activation", f"the activation is {variant.activation}, Liger has {' and '.join(_KERNELS)}")
    assert site.module is not None
    width = getattr(site.module._modules[variant.projections[0]], "out_features", None)
    if isinstance(width, int):
        width //= 2 if len(variant.projections) == 2 else 1
        if width > WIDEST:
            return Reason("width", f"Liger's rows have at most {WIDEST} columns, the intermediate size is {width}")
    return device_reason(site)


@functools.cache
def product_function(activation: str) -> type[torch.autograd.Function]:
    """The autograd Function of ``activation(gate) * up``, from Liger's forward and backward."""
    forward_kernel, backward_kernel = (liger_function(name) for name in _KERNELS[activation])

    class LigerProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            gate, up = gate.contiguous(), up.contiguous()
            ctx.save_for_backward(gate, up)
            result = forward_kernel(gate, up)
            return result[-1] if isinstance(result, tuple) else result  # Liger for Ascend returns the product alone

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate, up = saved_tensors(ctx, "the gated product by liger")
            # Liger writes both gradients over what it is given. These are the projections' own outputs: a hook or a
            # second backward may still read them, and autograd wouldn't notice. The copies cost one more read and
            # write of gate and up, and their memory while this runs.
            return backward_kernel(gate.clone(), up.clone(), grad.contiguous())

    return differentiable_once(LigerProduct)


def load(target: Any, site: Site) -> type[nn.Module]:
    """The layer class for one variant; the projections are called as modules."""
    variant: GluVariant = site.variant
    function = product_function(variant.activation)
    activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[variant.activation]

    def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # What the projections return is known only now, after they ran: this isn't counted as a fallback.
        if gate.shape != up.shape or call_reason(gate, up) is not None:
            return activation(gate) * up
        return launch(function, gate, up)

    def accepts_call(self: Any, x: torch.Tensor) -> str | None:
        return call_reason(x)

    return glu_layer("LigerGLU", variant, product, accepts_call=accepts_call)
