"""How the Triton programs of the norms are launched: grids, arguments, and what tells one layout from another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from twinkle.kernel.ops.rms_norm import triton_kernels as kernels
from twinkle.kernel.ops.triton_parts import GROUP, counters
from twinkle.kernel.ops.triton_support import Rows, far, processors, rows_of, tuned
from twinkle.triton_programs import NO_SCRATCH, Launch, Make

Kind = tuple[float, float, str]
"""``eps, offset, cast`` of :mod:`twinkle.kernel.ops.rms_norm.reference`; a plain tuple, since every call makes one."""

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The gradients of the input, of the weight where wanted, and of the gate where there is one."""

WIDEST = {"forward": 32768, "backward": 16384}
"""Rows up to this width are kept in registers; wider ones are read twice."""

WIDE_BLOCK = 8192
"""How much of a wider row is read at a time."""


class Tiling(NamedTuple):
    """How rows are dealt to programs."""

    rows_each: int
    block: int
    warps: int
    programs: int
    stages: int


def tiling_of(device: torch.device, direction: str, width: int, rows: int) -> Tiling:
    """The tuned one of a launch. While a compiler traces, ``rows`` may be a symbol."""
    block = triton.next_power_of_2(width)
    if block > WIDEST[direction]:
        block = WIDE_BLOCK
    elements, warps, per_processor, stages = tuned("rms_norm", direction, device, block)
    rows_each = max(1, elements // block)
    if isinstance(rows, int):
        rows_each = min(rows_each, triton.next_power_of_2(rows))
    programs = triton.cdiv(rows, rows_each)
    if direction == "backward":
        most = processors(device) * per_processor
        programs = min(programs, most) if isinstance(rows, int) else most
    return Tiling(rows_each, block, warps, programs, stages)


def layout_of(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, kind: Kind) -> tuple[Any, ...]:
    """What tells one forward launch from another, results included."""
    key = (x.shape, x.stride(), x.dtype, x.device, None if weight is None else weight.dtype, kind)
    return key if gate is None else (*key, gate.stride(), gate.dtype)


def forward(
    make: Make, x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, y: torch.Tensor, kind: Kind
) -> Callable[..., None]:
    """A function ``(x, weight, gate, y)`` that computes ``y``.

    Args:
        make: how it is launched.
        x, weight, gate, y: tensors like those that it will be called with; only their layouts are looked at.
    """
    width = int(x.shape[-1])  # compiled in: a compiler that traces must settle it, should it be a symbol
    rows = [_rows(tensor) for tensor in (x, gate, y)]
    count = rows[0].total
    rows_each, block, warps, programs, _ = tiling_of(x.device, "forward", width, count)
    eps, offset, cast = kind
    constants = {
        "OFFSET": offset, "CAST": cast, "HAS_WEIGHT": weight is not None, "HAS_GATE": gate is not None,
        "ROWS": rows_each, "BLOCK": block, "LOOP": block < width, "FAR": _far(width, rows),
    }  # fmt: skip
    scalars = (count, width, eps, *_strides(rows))
    return make(kernels.forward_kernel, Launch((programs,), scalars, constants, warps))


def backward(
    make: Make,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    results: Results,
    eps: float,
    offset: float,
) -> Callable[..., None]:
    """A function ``(dy, x, weight, gate, *results)`` that computes the results.

    Args:
        make: how it is launched.
        dy, x, weight, gate, results: tensors like those that it will be called with; only their layouts are looked at.
    """
    width = int(x.shape[-1])
    dx, dw, dgate = results
    if width > WIDEST["backward"]:
        return _wide_backward(make, width, dy, x, weight, dx, dw, eps, offset)
    rows = [_rows(tensor) for tensor in (dy, x, gate, dx, dgate)]
    count = rows[1].total
    rows_each, block, warps, programs, stages = tiling_of(x.device, "backward", width, count)
    constants = {
        "OFFSET": offset, "HAS_WEIGHT": weight is not None, "HAS_GATE": gate is not None,
        "NEEDS_DW": dw is not None, "ROWS": rows_each, "BLOCK": block, "GROUP": GROUP, "STAGES": stages,
        "FAR": _far(width, rows),
    }  # fmt: skip
    scratch = None if dw is None else (counters(programs), programs * width)
    sizes = count, width, triton.cdiv(count, rows_each), programs
    scalars = (*(() if scratch else NO_SCRATCH), *sizes, eps, *_strides(rows))
    return make(kernels.backward_kernel, Launch((programs,), scalars, constants, warps, scratch=scratch))


def _wide_backward(
    make: Make,
    width: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dx: torch.Tensor,
    dw: torch.Tensor | None,
    eps: float,
    offset: float,
) -> Callable[..., None]:
    """Rows that don't fit in registers: one launch for ``dx``, one over the columns for the weight's gradient."""
    rows = [_rows(tensor) for tensor in (dy, x, dx)]
    count = rows[1].total
    constants = {
        "OFFSET": offset, "HAS_WEIGHT": weight is not None, "NEEDS_DW": dw is not None, "BLOCK": WIDE_BLOCK,
        "FAR": _far(width, rows),
    }  # fmt: skip
    for_dx = make(kernels.wide_backward_kernel, Launch((count,), (width, eps, *_strides(rows)), constants, 16))
    constants = {"ROWS": 32, "BLOCK": 128, "FAR": _far(width, rows[:2])}
    launch = Launch((triton.cdiv(width, 128),), (count, width, *_strides(rows[:2])), constants, 4)
    for_dw = None if dw is None else make(kernels.wide_weight_kernel, launch)

    def call(dy: Any, x: Any, weight: Any, gate: Any, dx: Any, dw: Any, dgate: Any) -> None:
        rstd = None if for_dw is None else x.new_empty(count, dtype=torch.float32)
        for_dx(dy, x, weight, dx, rstd)
        if for_dw is not None:
            for_dw(dy, x, rstd, dw)

    return call


_NO_ROWS = Rows(0, 1, 1, 0, 0, 0, 0)


def _rows(tensor: torch.Tensor | None) -> Rows:
    if tensor is None:
        return _NO_ROWS
    if tensor.is_contiguous():  # also the only case while a compiler traces, whose sizes can't be cache keys
        width = tensor.shape[-1]
        return Rows(tensor.numel() // width, 1, 1, width, 0, 0, 1)
    rows = rows_of(tensor.shape, tensor.stride())
    assert rows is not None
    return rows


def _strides(rows: list[Rows]) -> list[int]:
    """The kernels' arguments from ``Rows.middle`` on, tensor by tensor."""
    return [number for one in rows for number in one[1:]]


def _far(width: int, rows: list[Rows]) -> bool:
    return far(*((width, one.column_stride) for one in rows))
