"""What the ``liger`` backends share: whether Liger's kernels run on this machine, where, and for which tensors.

Liger's own classes and ``apply_liger_kernel_to_*`` functions are not used: they patch whole processes. Its autograd
Functions are, each behind a thin one of ours that keeps what callers may rely on (see the ops' ``liger`` modules).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from twinkle.kernel.ops.torch_support import DTYPES, PLAIN, elsewhere, transformed
from twinkle.naming import version_of
from twinkle.reasons import Reason
from twinkle.triton_programs import device_types, interpreted, on_device

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

GPU_TYPES = ("cuda", "npu", "xpu")
"""Device types that Liger has kernels for, in the order in which it chooses one per process."""

WIDEST = 65536
"""Liger raises for rows of more columns."""

SYMBOLS = (
    "LigerRMSNormFunction",
    "LigerRopeFunction",
    "LigerFusedMoEFunction",
    *("swiglu_forward", "swiglu_backward", "geglu_forward", "geglu_backward"),
)
"""What the ops use of ``liger_kernel.ops``."""

_INSTALL = "pip install 'twinkle-kernel[liger]'"

# Set by available(), read on every call: device types that the kernels can be launched on.
_launchable: frozenset[str] = frozenset()


def available(symbols: tuple[str, ...] = SYMBOLS) -> tuple[bool, Reason | None]:
    """Whether Liger's kernels run here: a device that Triton drives, both packages, and the symbols.

    Liger is imported (which takes seconds) only when the rest is there.

    Args:
        symbols: names that ``liger_kernel.ops`` must have.
    """
    global _launchable
    try:
        nowhere = f"no device for Liger's Triton kernels: none of {', '.join(GPU_TYPES)}"
        found = device_types(GPU_TYPES, nowhere, _INSTALL)
        if isinstance(found, Reason):
            return False, found
        missing = _missing(symbols) or (_disproved() if interpreted() else None)
    except Exception as error:
        return False, Reason.of_error(error, "not-available", "looking for Liger")
    if missing is None:
        _launchable = found
    return missing is None, missing


def _missing(symbols: tuple[str, ...]) -> Reason | None:
    """Why Liger can't be used, of the package's own reasons."""
    if importlib.util.find_spec("liger_kernel") is None:
        return Reason("no-package", "the package liger-kernel is not installed", _INSTALL)
    try:
        ops = importlib.import_module("liger_kernel.ops")
    except Exception as error:
        return Reason.of_error(error, "broken-package", "importing liger_kernel.ops")
    absent = [name for name in symbols if not hasattr(ops, name)]
    if not absent:
        return None
    version = version_of("liger-kernel")
    of_version = f" of liger-kernel {version}" if version else ""
    return Reason("no-symbol", f"liger_kernel.ops{of_version} has no {', '.join(absent)}", "wanted: liger-kernel>=0.8")


@functools.cache
def _disproved() -> Reason | None:
    """Runs two kernels on a few numbers: interpreters of Triton have gaps that raise, or give wrong numbers in bf16."""
    ops = importlib.import_module("liger_kernel.ops")
    hint = "run on a GPU, or with a newer Triton"
    x = torch.linspace(-2, 2, 8, device="cpu", dtype=torch.bfloat16).view(1, 8)
    try:
        with torch.no_grad():
            normed = ops.LigerRMSNormFunction.apply(x, torch.ones_like(x[0]), 1e-6, 0.0, "llama", False)
            product = ops.swiglu_forward(x, x)[-1]
    except Exception as error:
        reason = Reason.of_error(error, "interpreter", "running Liger's kernels in Triton's interpreter")
        return Reason(reason.code, reason.text, hint)
    wide = x.float()
    right = torch.allclose(normed.float(), F.rms_norm(wide, (8,), eps=1e-6), rtol=2e-2, atol=1e-3)
    if right and torch.allclose(product.float(), F.silu(wide) * wide, rtol=2e-2, atol=1e-3):
        return None
    return Reason("interpreter", "Triton's interpreter computes wrong numbers in bf16", hint)


def device_reason(site: Site) -> Reason | None:
    """Why Liger's kernels can't run on a site's device; asked after :func:`available` said yes."""
    kind = site.device.type
    if kind in _launchable:
        return None
    return elsewhere(site, f"Liger's kernels run on {', '.join(sorted(_launchable))} here, not on {kind}")


def call_reason(*tensors: torch.Tensor, one_dtype: bool = True) -> str | None:
    """Why a call is not for Liger; None for the ordinary one, at the cost of a few attribute reads.

    Under a compiler it always is: the functions around Liger's kernels don't trace into one graph, and a compiler fuses
    the original by itself.

    Args:
        tensors: what the kernel reads; the rows of the first are what it works on.
        one_dtype: whether all must have the first one's dtype.
    """
    if is_compiling():
        return "inside a compiler, which fuses the original"
    first = tensors[0]
    device, dtype = first.device, first.dtype
    if device.type not in _launchable:
        return "the tensors are on a device that Liger's kernels don't run on"
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return "a tensor subclass"
        if tensor.is_neg():
            return "a negated tensor"  # whose memory has the other signs
        if tensor.device != device:
            return "the tensors are on different devices"
        if tensor.dtype not in DTYPES:
            return "the dtype is none of fp32, bf16, fp16"
        if one_dtype and tensor.dtype != dtype:
            return "the tensors have different dtypes"
    if first.dim() == 0 or first.numel() == 0:
        return "an empty tensor"
    if first.shape[-1] > WIDEST:
        return "rows wider than 65536"
    return transformed()


def liger_function(name: str) -> Any:
    """A function or autograd Function of ``liger_kernel.ops``: the implementation that Liger chose for this machine."""
    return getattr(importlib.import_module("liger_kernel.ops"), name)


def differentiable_once(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same autograd Function, which takes negated gradients too, and raises when its gradient is differentiated.

    Liger's kernels read the memory, in which a negated tensor's numbers have the other signs; and they leave no graph
    behind: without this, a gradient penalty would silently miss their part.
    """

    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return function.backward(ctx, *(grad if grad is None else grad.resolve_neg() for grad in grads))

    namespace = {"backward": staticmethod(backward), "__doc__": function.__doc__}
    return type(function)(function.__name__, (function,), namespace)  # type: ignore[misc]


def launch(function: type[torch.autograd.Function], tensor: torch.Tensor, *rest: Any) -> Any:
    """``function.apply(tensor, *rest)`` on the tensor's device, which need not be the current one.

    Not all of Liger's functions see to that. Backward needs nothing: autograd runs it with the device set.
    """
    with on_device(tensor):
        return function.apply(tensor, *rest)
