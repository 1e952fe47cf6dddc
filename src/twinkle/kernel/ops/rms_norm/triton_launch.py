"""How the Triton programs of the norms are launched: grids, arguments, and what tells one launch from another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from twinkle.kernel.ops.rms_norm import triton_kernels as kernels
from twinkle.kernel.ops.triton_support import Launch, Launcher, Rows, Workspace, far, processors, rows_of, tuned

Kind = tuple[float, float, str]
"""``(eps, offset, cast)``: see :mod:`twinkle.kernel.ops.rms_norm.reference`."""

GROUP = 16
"""Programs whose weight gradients are added first; their sums are added next."""

WIDEST = {"forward": 32768, "backward": 16384}
"""Rows up to this width are kept in registers; wider ones are read twice."""

WIDE_BLOCK = 8192
"""How much of a wider row is read at a time."""


class Shape(NamedTuple):
    """How rows are dealt to programs."""

    rows_each: int
    block: int
    warps: int
    programs: int
    stages: int


def shape_of(device: torch.device, direction: str, width: int, rows: int) -> Shape:
    """The tuned shape of a launch. While a compiler traces, ``rows`` may be a symbol, which can't be a cache's key."""
    return (_known_shape if type(rows) is int else _shape)(device, direction, width, rows)


def _shape(device: torch.device, direction: str, width: int, rows: int) -> Shape:
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
    return Shape(rows_each, block, warps, programs, stages)


_known_shape = functools.lru_cache(maxsize=1024)(_shape)


def layout_of(x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, kind: Kind) -> tuple[Any, ...]:
    """What tells one forward launch from another, results included; with ``dy``'s strides, one backward launch."""
    key = (x.shape, x.stride(), x.dtype, x.device, None if weight is None else weight.dtype, kind)
    return key if gate is None else (*key, gate.stride(), gate.dtype)


def launch_forward(
    launcher: Launcher,
    key: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    y: torch.Tensor,
    kind: Kind,
) -> torch.Tensor:
    """Launches the forward into ``y``; returns ``rstd``, ``[rows]`` in fp32."""
    width = int(x.shape[-1])  # compiled in: a compiler that traces must settle it, should it be a symbol
    rstd = x.new_empty(x.numel() // width, dtype=torch.float32)

    def make() -> Launch:
        rows = [_rows(tensor) for tensor in (x, gate, y)]
        count = rows[0].total
        shape = shape_of(x.device, "forward", width, count)
        eps, offset, cast = kind
        constants = {
            "OFFSET": offset, "CAST": cast, "HAS_WEIGHT": weight is not None, "HAS_GATE": gate is not None,
            "ROWS": shape.rows_each, "BLOCK": shape.block, "LOOP": shape.block < width, "FAR": _far(width, rows),
        }  # fmt: skip
        return Launch((shape.programs,), (count, width, eps, *_strides(rows)), constants, shape.warps)

    launcher(kernels.forward_kernel, key, (x, weight, gate, y, rstd), make)
    return rstd


def launch_backward(
    launcher: Launcher,
    key: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    rstd: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    offset: float,
    scratch: Callable[[torch.device, int, int], Workspace],
) -> None:
    """Launches the backward into ``results``: the gradients of ``x``, of the weight where wanted, and of the gate."""
    width = int(x.shape[-1])
    dx, dw, dgate = results
    if width > WIDEST["backward"]:
        _wide_backward(launcher, key, dy, x, weight, rstd, dx, dw, offset)
        return
    rows_each, block, warps, programs, stages = shape_of(x.device, "backward", width, rstd.numel())
    partial = arrived = None
    if dw is not None:
        room = scratch(x.device, 1 + (programs + GROUP - 1) // GROUP, programs * width)
        partial, arrived = room.floats, room.counters

    def make() -> Launch:
        rows = [_rows(tensor) for tensor in (dy, x, gate, dx, dgate)]
        count = rows[1].total
        constants = {
            "OFFSET": offset, "HAS_WEIGHT": weight is not None, "HAS_GATE": gate is not None,
            "NEEDS_DW": dw is not None, "ROWS": rows_each, "BLOCK": block, "GROUP": GROUP, "STAGES": stages,
            "FAR": _far(width, rows),
        }  # fmt: skip
        scalars = (count, width, triton.cdiv(count, rows_each), programs, *_strides(rows))
        return Launch((programs,), scalars, constants, warps)

    launcher(kernels.backward_kernel, key, (dy, x, weight, gate, rstd, dx, dgate, dw, partial, arrived), make)


def _wide_backward(
    launcher: Launcher,
    key: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dw: torch.Tensor | None,
    offset: float,
) -> None:
    """Rows that don't fit in registers: one launch for ``dx``, one over the columns for the weight's gradient."""
    width, count = x.shape[-1], rstd.numel()

    def make_dx() -> Launch:
        rows = [_rows(tensor) for tensor in (dy, x, dx)]
        has_weight = weight is not None
        constants = {"OFFSET": offset, "HAS_WEIGHT": has_weight, "BLOCK": WIDE_BLOCK, "FAR": _far(width, rows)}
        return Launch((count,), (count, width, *_strides(rows)), constants, 16)

    def make_dw() -> Launch:
        rows = [_rows(tensor) for tensor in (dy, x)]
        constants = {"ROWS": 32, "BLOCK": 128, "FAR": _far(width, rows)}
        return Launch((triton.cdiv(width, 128),), (count, width, *_strides(rows)), constants, 4)

    launcher(kernels.wide_backward_kernel, key, (dy, x, weight, rstd, dx), make_dx)
    if dw is not None:
        launcher(kernels.wide_weight_kernel, key, (dy, x, rstd, dw), make_dw)


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
