"""Launching the programs of a mixture of experts: shapes, strides and tile sizes.

Everything here takes rows that lie expert by expert, see :class:`twinkle.kernel.ops.moe.routing.Route`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from twinkle.kernel.ops.moe import triton_kernels as kernels
from twinkle.kernel.ops.moe.experts_reference import Gate, compared_with
from twinkle.kernel.ops.moe.routing import Route
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Program, on_device


class Projection(NamedTuple):
    """How a stack of weights lies: strides in elements.

    Attributes:
        expert: from expert to expert.
        column: from one output of the projection to the next.
        row: from one input to the next.
        second: from the gate's first output to the up projection's; 0 where there is one projection.
    """

    expert: int
    column: int
    row: int
    second: int = 0


def gate_up_projection(weight: torch.Tensor, transposed: bool, interleaved: bool) -> Projection:
    """Of ``[E, 2 I, H]``, or ``[E, H, 2 I]`` when transposed; gate first, or gate and up in turns."""
    expert, first, second = weight.stride()
    column, row = (second, first) if transposed else (first, second)
    width = weight.shape[2 if transposed else 1] // 2
    return (
        Projection(expert, 2 * column, row, column) if interleaved else Projection(expert, column, row, width * column)
    )


def down_projection(weight: torch.Tensor, transposed: bool) -> Projection:
    """Of ``[E, H, I]``, or ``[E, I, H]`` when transposed."""
    expert, first, second = weight.stride()
    return Projection(expert, second, first) if transposed else Projection(expert, first, second)


class Tiles(NamedTuple):
    """Of one program: rows and columns of the result, how much is summed at a time, and how it is run."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8

    def within(self, room: int, dtype: torch.dtype, weights: int = 1) -> Tiles:
        """The same for another dtype than those of two bytes, and for a GPU with less shared memory.

        Args:
            room: bytes of shared memory that a program may have.
            weights: how many tiles of weights are multiplied with one of rows.
        """
        tiles = self._replace(inner=max(16, self.inner * 2 // dtype.itemsize))

        def bytes_of(tiles: Tiles) -> int:
            return (tiles.rows + weights * tiles.columns) * tiles.inner * dtype.itemsize * tiles.stages

        while bytes_of(tiles) > room and tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        while bytes_of(tiles) > room and tiles.columns > 32:
            tiles = tiles._replace(columns=tiles.columns // 2)
        return tiles


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 2**16
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**16))


# The best of four or five each on an H200, 65,536 rows of 128 experts, hidden size 2048 and width 768, bf16.
UP = Tiles(128, 128, 64, 8, 4)
ROWS = Tiles(128, 256, 64, 8, 3)
GATE_BACKWARD = Tiles(128, 128, 64, 8, 4)
WEIGHT = Tiles(128, 128, 64, 8, 4)

_programs: Memory[Program] = Memory()


def _row_tiles(route: Route, tiles: Tiles) -> int:
    """As many as there may be: each expert may leave one unfilled."""
    return triton.cdiv(route.slots.numel(), tiles.rows) + min(route.ends.numel(), route.slots.numel())


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _grouped(route: Route, tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time values that the grouped programs share."""
    return {
        "PRECISION": _precision(dtype),
        "EXPERTS": triton.next_power_of_2(route.ends.numel()),
        "GROUP": tiles.group,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "INNER": tiles.inner,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _gate(gate: Gate, dtype: torch.dtype) -> tuple[tuple[float, float, float], dict[str, Any]]:
    limit = 0.0 if gate.limit is None else compared_with(gate.limit, dtype)
    return (limit, gate.alpha, gate.offset), {
        "ACTIVATION": gate.activation,
        "CLAMPED": gate.limit is not None,
    }


def up(
    x: torch.Tensor,
    route: Route,
    weight: torch.Tensor,
    at: Projection,
    bias: torch.Tensor | None,
    bias_at: Projection | None,
    gate: Gate,
    width: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[S, I]`` gated products of ``x [T, H]``, and with ``keep`` both projections ``[S, 2 I]``."""
    total, tiles = route.slots.numel(), UP.within(_shared_memory(x.device), x.dtype, weights=2)
    out = torch.empty(total, width, dtype=x.dtype, device=x.device)
    gate_up = torch.empty(total, 2 * width, dtype=x.dtype, device=x.device) if keep else None
    row_tiles, column_tiles = _row_tiles(route, tiles), triton.cdiv(width, tiles.columns)
    numbers, constants = _gate(gate, x.dtype)
    where = bias_at or Projection(0, 0, 0)
    with on_device(x):
        kernels.up_kernel[(row_tiles * column_tiles,)](
            x, route.slots, route.ends, weight, bias, gate_up, out,
            route.ends.numel(), row_tiles, column_tiles, x.shape[1], width, route.top_k, x.stride(0),
            at.expert, at.column, at.row, at.second, where.expert, where.column, where.second, *numbers,
            BIAS=bias is not None, KEEP=keep, **constants, **_grouped(route, tiles, x.dtype),
        )  # fmt: skip
    return out, gate_up


def rows(
    a: torch.Tensor,
    route: Route,
    weight: torch.Tensor,
    at: Projection,
    width: int,
    bias: torch.Tensor | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """``[S, N]``: each row of ``a [S, parts * K]`` times its expert's weight."""
    tiles = ROWS.within(_shared_memory(a.device), a.dtype)
    out = torch.empty(a.shape[0], width, dtype=a.dtype, device=a.device)
    row_tiles, column_tiles = _row_tiles(route, tiles), triton.cdiv(width, tiles.columns)
    inner = a.shape[1] // parts
    with on_device(a):
        kernels.rows_kernel[(row_tiles * column_tiles,)](
            a, route.ends, weight, bias, out,
            route.ends.numel(), row_tiles, column_tiles, inner, width, a.stride(0), inner,
            at.expert, at.column, at.row, at.second, 0 if bias is None else bias.stride(0),
            PARTS=parts, BIAS=bias is not None, **_grouped(route, tiles, a.dtype),
        )  # fmt: skip
    return out


def combine(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``[T, H]``: for each token the sum of the rows of ``y [S, H]`` in its places, weighted by ``weights [T, K]``.

    Args:
        y: each row in one piece; from row to row there may be more.
        places: ``[T, K]`` contiguous; -1 for none.
    """
    (tokens, top_k), (stride, width) = places.shape, (y.stride(0), y.shape[1])
    out = torch.empty(tokens, width, dtype=dtype, device=y.device)
    types = y.dtype, places.dtype, None if weights is None else weights.dtype, dtype
    key = ("combine", tokens, top_k, stride, width, types, y.device)
    program = _programs.get(key)
    if program is None:
        columns = min(1024, triton.next_power_of_2(width))
        constants = {"WEIGHTED": weights is not None, "COLUMNS": columns}
        launch = Launch((tokens, triton.cdiv(width, columns)), (stride, width, top_k, width), constants, 4)
        program = _programs.add(key, Program(kernels.combine_kernel, launch))
    program(y, places, weights, out)
    return out


def gate_backward(
    grad: torch.Tensor,
    route: Route,
    weight: torch.Tensor,
    at: Projection,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate: Gate,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of both projections ``[S, 2 I]``, weighted gated products ``[S, I]``, gradient of ``weights [S]``."""
    total, tiles = route.slots.numel(), GATE_BACKWARD.within(_shared_memory(grad.device), grad.dtype)
    width = gate_up.shape[1] // 2
    dgate_up = torch.empty_like(gate_up)
    product = torch.empty(total, width, dtype=gate_up.dtype, device=grad.device)
    row_tiles, column_tiles = _row_tiles(route, tiles), triton.cdiv(width, tiles.columns)
    share = torch.empty(column_tiles, total, dtype=torch.float32, device=grad.device)
    numbers, constants = _gate(gate, gate_up.dtype)
    with on_device(grad):
        kernels.gate_backward_kernel[(row_tiles * column_tiles,)](
            grad, route.slots, route.ends, weight, weights, gate_up, dgate_up, product, share,
            total, route.ends.numel(), row_tiles, column_tiles, grad.shape[1], width, route.top_k, grad.stride(0),
            at.expert, at.row, at.column, *numbers,  # the weight is read the other way round
            **constants, **_grouped(route, tiles, grad.dtype),
        )  # fmt: skip
    return dgate_up, product, share.sum(0)


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    route: Route,
    out: torch.Tensor,
    at: Projection,
    bias: torch.Tensor | None = None,
    bias_at: Projection | None = None,
    *,
    a_by_token: bool = False,
    b_by_token: bool = False,
) -> None:
    """Writes ``a.T @ b`` over each expert's rows into ``out``; and the sums of ``a``'s rows into ``bias``."""
    tiles = WEIGHT.within(_shared_memory(a.device), a.dtype)
    height, width = a.shape[1], b.shape[1]
    height_tiles, width_tiles = triton.cdiv(height, tiles.rows), triton.cdiv(width, tiles.columns)
    where = bias_at or Projection(0, 0, 0)
    half = height // 2 if at.second else height
    with on_device(a):
        kernels.weight_kernel[(route.ends.numel() * height_tiles * width_tiles,)](
            a, b, route.slots, route.ends, out, bias,
            height_tiles, width_tiles, height, width, half, route.top_k, a.stride(0), b.stride(0),
            at.expert, at.column, at.row, at.second, where.expert, where.column, where.second,
            A_TOKENS=a_by_token, B_TOKENS=b_by_token, BIAS=bias is not None, PRECISION=_precision(a.dtype),
            ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def weighted_sums(grad: torch.Tensor, route: Route, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[E, H]`` as ``like``: each expert's sum of ``grad [T, H]`` over its slots, weighted by ``weights [T, K]``."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    experts, width = out.shape
    with on_device(grad):
        kernels.weighted_sums_kernel[(experts, triton.cdiv(width, 128))](
            grad, route.slots, route.ends, weights, out, width, route.top_k, grad.stride(0),
            ROWS=32, COLUMNS=128, num_warps=4,
        )  # fmt: skip
    return out


def gate(gate_up: torch.Tensor, route: Route, kind: Gate) -> torch.Tensor:
    """``[S, I]`` gated products of both projections ``[S, 2 I]``, gate first."""
    total, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(total, width, dtype=gate_up.dtype, device=gate_up.device)
    key = ("gate", gate_up.shape, gate_up.dtype, len(route.ends), kind, gate_up.device)
    program = _programs.get(key)
    if program is None:
        numbers, constants = _gate(kind, gate_up.dtype)
        constants["COLUMNS"] = columns = min(1024, triton.next_power_of_2(width))
        launch = Launch((total, triton.cdiv(width, columns)), (len(route.ends), width, *numbers), constants, 4)
        program = _programs.add(key, Program(kernels.gate_kernel, launch))
    program(gate_up, route.ends, out)
    return out


def gate_backward_rows(
    back: torch.Tensor, route: Route, weights: torch.Tensor, gate_up: torch.Tensor, kind: Gate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`gate_backward`, from the gradient of the unweighted gated products ``[S, I]``."""
    total, width = back.shape
    dgate_up, product = torch.empty_like(gate_up), torch.empty_like(back)
    share = torch.empty(total, dtype=torch.float32, device=back.device)
    key = ("gate_backward", back.shape, back.dtype, weights.dtype, len(route.ends), kind, back.device)
    program = _programs.get(key)
    if program is None:
        numbers, constants = _gate(kind, gate_up.dtype)
        constants["COLUMNS"] = min(1024, triton.next_power_of_2(width))
        launch = Launch((total,), (len(route.ends), width, *numbers), constants, 4)
        program = _programs.add(key, Program(kernels.gate_backward_rows_kernel, launch))
    program(back, route.slots, route.ends, weights, gate_up, dgate_up, product, share)
    return dgate_up, product, share
