"""The ``liger`` backend of ``rotary``: query and key turned by one kernel.

Liger reads the first half of cos and sin only. A rotation has one angle per pair of channels, so every rotary embedding
gives both halves the same values; a table whose halves differ is not for this kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops import liger_support
from twinkle.kernel.ops.liger_support import call_reason, device_reason, differentiable_once, launch, liger_function
from twinkle.kernel.ops.rotary.reference import Dialect, function_of
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.ops.rotary.reference import RotaryVariant
    from twinkle.kernel.targets import Site

available = functools.partial(liger_support.available, ("LigerRopeFunction",))

_DIALECTS = (Dialect(), Dialect(restores=True))


def accepts(site: Site) -> Reason | None:
    """Half-split rotation of query and key ``[B, H, S, D]``, on a device that Liger's kernels run on."""
    variant: RotaryVariant = site.variant
    if variant.dialect not in _DIALECTS:
        plain = dataclasses.asdict(Dialect())
        other = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(variant.dialect).items() if v != plain[k])
        return Reason("dialect", f"Liger turns channel i with i + R/2 by tables that are as wide; this has {other}")
    if variant.tensors != 2 or "unsqueeze_dim" not in variant.parameters:
        return Reason("signature", f"Liger turns query and key, the call is ({', '.join(variant.parameters)})")
    return device_reason(site)


@functools.cache
def rotary_function() -> type[torch.autograd.Function]:
    """Liger's autograd Function, kept from writing into what belongs to others."""
    liger = liger_function("LigerRopeFunction")

    class LigerRotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return liger.forward(ctx, _own(q), _own(k), cos, sin)

        @staticmethod
        def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            dq, dk = liger.backward(ctx, _own(dq), _own(dk))[:2]
            return dq, dk, None, None

    return differentiable_once(LigerRotary)


def _own(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``[B, H, S, D]``, laid out as ``[B, S, H, D]``.

    The kernel works in place on that layout, and models hand over exactly that: views of the projections' outputs, or
    a gradient that other branches share. In any other layout Liger itself makes the copy.
    """
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def load(target: Any, site: Site) -> Callable[..., Any]:
    """The function for one variant, called as the original is."""
    variant: RotaryVariant = site.variant
    function = rotary_function()
    restores = variant.dialect.restores
    # Without this parameter Liger takes the whole head for the rotated width.
    takes_width = "rotary_dim" in inspect.signature(liger_function("LigerRopeFunction").forward).parameters
    partial = variant.partial and takes_width
    doubled: dict[int, bool] = {}

    def kernel(tensors: tuple[Any, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        return launch(function, *tensors, cos, sin)

    def reason(tensors: tuple[Any, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> str | None:
        q, k = tensors
        why = call_reason(q, k, cos, sin, one_dtype=False)
        if why is not None:
            return why
        # Liger computes in the tables' dtype and returns q's: with other dtypes the original promotes its result, or
        # computes in more bits.
        if k.dtype != q.dtype or not (cos.dtype == sin.dtype in ((q.dtype, torch.float32) if restores else (q.dtype,))):
            return "q and k or cos and sin have different dtypes"
        if unsqueeze_dim != 1 or q.dim() != 4 or cos.dim() != 3:
            return "q, k of [batch, heads, sequence, channels] and cos, sin of [batch, sequence, channels] only"
        batch, _, length, channels = q.shape
        width = cos.shape[-1]
        if (k.shape[0], k.shape[2], k.shape[3]) != (batch, length, channels) or cos.shape != sin.shape:
            return "the shapes of q and k or of cos and sin differ"
        if cos.shape[0] not in (1, batch) or cos.shape[1] != length:
            return "cos and sin have another batch or sequence than q"
        if width != channels and not (partial and width < channels and width % 2 == 0):
            return "cos and sin are not as wide as the head"
        if cos.requires_grad or sin.requires_grad:
            return "cos or sin need a gradient"
        # Looked at once per width: looking at every table would make the CPU wait for the GPU at every call.
        if width not in doubled:
            doubled[width] = _halves_equal(cos) and _halves_equal(sin)
        return None if doubled[width] else "the halves of cos or sin differ"

    return function_of(variant, kernel, reason, "liger_rotary")


def _halves_equal(table: torch.Tensor) -> bool:
    first, second = table.chunk(2, dim=-1)
    return torch.equal(first, second)
