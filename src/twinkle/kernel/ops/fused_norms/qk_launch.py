"""How the Triton programs of norms and rotary are launched: grids and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from twinkle.kernel.ops.fused_norms import qk_kernels as kernels
from twinkle.kernel.ops.fused_norms.qk_reference import Rotated
from twinkle.kernel.ops.rotary.triton_layout import dealt, places, strides_of
from twinkle.kernel.ops.triton_parts import GROUP, counters
from twinkle.kernel.ops.triton_support import processors, tuned
from twinkle.triton_programs import NO_SCRATCH, Launch, Make


class Kind(NamedTuple):
    """What is computed, see :func:`~twinkle.kernel.ops.fused_norms.qk_reference.original`."""

    q_eps: float
    k_eps: float
    offset: float
    cast: str
    heads_at: int


class _Geometry:
    """How a call's heads are dealt to programs; the numbers and constants that both directions have in common."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: Kind, direction: str
    ) -> None:
        at = kind.heads_at
        # These are compiled in: a compiler that traces must settle them, should they be symbols.
        self.head_dim, turning, *heads = map(int, (q.shape[-1], cos.shape[-1], q.shape[at], k.shape[at]))
        pairs, rest = turning // 2, self.head_dim - turning
        elements, self.warps, self.per_processor = tuned("qk_norm_rotary", direction, q.device, 1)
        each, blocks = dealt(heads, max(1, elements // triton.next_power_of_2(self.head_dim)))
        length = q.shape[3 - at]
        self.items = q.shape[0] * length * blocks
        self.scalars = (kind.q_eps, kind.k_eps, length, *heads, blocks, self.head_dim, pairs)
        self.constants = {
            "OFFSET": kind.offset, "Q_HEADS": each[0], "K_HEADS": each[1], "PAIRS": triton.next_power_of_2(pairs),
            "REST": triton.next_power_of_2(rest) if rest else 0,
        }  # fmt: skip
        self.heads = max(heads)


def forward(
    make: Make, q: torch.Tensor, k: torch.Tensor, results: Rotated, cos: torch.Tensor, sin: torch.Tensor, kind: Kind
) -> Callable[..., None]:
    """A function ``(q, k, q_result, k_result, q_weight, k_weight, cos, sin)``.

    Args:
        make: how it is launched.
        q, k, results, cos, sin: tensors like those that it will be called with; only their layouts are looked at.
    """
    geometry = _Geometry(q, k, cos, sin, kind, "forward")
    strides = [strides_of(t, kind.heads_at) for t in (q, k)] + [strides_of(t, 1) for t in results]
    scalars, is_far = places(strides, (cos, sin), geometry.heads, geometry.head_dim)
    constants = {**geometry.constants, "CAST": kind.cast, "FAR": is_far}
    launch = Launch((geometry.items,), (*geometry.scalars, *scalars), constants, geometry.warps)
    return make(kernels.forward_kernel, launch)


def backward(
    make: Make,
    grads: Rotated,
    q: torch.Tensor,
    k: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kind: Kind,
    needs_dw: bool,
) -> Callable[..., None]:
    """A function ``(q_grad, k_grad, q, k, dq, dk, q_weight, k_weight, cos, sin, dq_weight, dk_weight)``.

    Args:
        make: how it is launched.
        needs_dw: whether those are wanted; without it their tensors are None.
    """
    geometry = _Geometry(q, k, cos, sin, kind, "backward")
    strides = [strides_of(t, 1) for t in grads] + [strides_of(t, kind.heads_at) for t in (q, k, dq, dk)]
    scalars, is_far = places(strides, (cos, sin), geometry.heads, geometry.head_dim)
    most = processors(q.device) * geometry.per_processor
    programs = min(geometry.items, most) if isinstance(geometry.items, int) else most
    width = 2 * geometry.head_dim
    constants = {
        **geometry.constants, "NEEDS_DW": needs_dw, "GROUP": GROUP, "WEIGHTS": triton.next_power_of_2(width),
        "FAR": is_far,
    }  # fmt: skip
    scratch = (counters(programs), programs * width) if needs_dw else None
    numbers = (*(() if scratch else NO_SCRATCH), *geometry.scalars, geometry.items, programs, *scalars)
    return make(kernels.backward_kernel, Launch((programs,), numbers, constants, geometry.warps, scratch=scratch))
