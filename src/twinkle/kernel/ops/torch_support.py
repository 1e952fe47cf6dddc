"""What the ``torch`` backends share: where they are known to win; what all do: which tensors and calls they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that kernels read: of a subclass nobody knows what its memory means."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels compute with."""

# F.rms_norm is one kernel on CUDA, with about a tenth of the original's traffic. What else may win there stays out
# until a result file says so.
FASTER: dict[str, tuple[str, ...]] = {
    "rms_norm": ("cpu", "cuda"),
    "gated_rms_norm": ("cpu", "cuda"),
    "rotary": ("cpu", "cuda"),
}
"""op -> the device types on which the torch backend was measured faster than the original, forward and backward.

``python -m benchmarks.verdict FILE`` derives a device type's part from a result file.
"""


def available() -> tuple[bool, Reason | None]:
    """PyTorch's own functions are there wherever PyTorch is."""
    return True, None


def not_faster(op: str, site: Site) -> Reason | None:
    """The reason why a site keeps the original although the kernel would fit; None where the kernel is faster."""
    device = site.device.type
    if device in FASTER[op]:
        return None
    return Reason(
        "not-faster",
        f"PyTorch's own functions were not measured faster than the original's {op} on {device}",
        f"measured in benchmarks/results/{device}/ops.json, if at all",
    )


def elsewhere(site: Site, text: str) -> Reason:
    """The reason of a site on a device that a backend doesn't run on."""
    hint = "say where the model will run: kernelize(model, device=…)" if site.device.type == "meta" else None
    return Reason("device", text, hint)


def transformed() -> str | None:
    """Why no autograd.Function of ours can serve this call, whatever its tensors; None for the ordinary one.

    Under ``vmap``, ``torch.func.grad``, … and forward-mode differentiation it would raise for want of rules; a trace
    would miss what it launches, or couldn't be saved.
    """
    if is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "inside a functorch transform"
    if forward_ad._current_level >= 0:
        return "inside forward-mode differentiation"
    if torch._C._is_tracing():
        return "inside torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_TRACES) is not None:
        return "inside make_fx"
    return None


_TRACES = torch._C._TorchDispatchModeKey.PROXY
