"""``scaled_dot_product_attention`` in Triton: one pass over the keys, no score is stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from twinkle.aten.launch import most_programs, program

from .programs import attend

ROWS = COLUMNS = 64
SMALL = 16
"""Rows and columns of a block in float64, whose products are summed without the matrix unit."""


def scaled_dot_product_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """See ``aten::scaled_dot_product_attention``. The result lies in memory as (batch, queries, heads, width)."""
    batch, heads, queries, width = query.shape
    out_width = value.shape[3]
    memory = torch.empty(batch, queries, heads, out_width, dtype=query.dtype, device=query.device)
    result = memory.transpose(1, 2)
    mask, kind, mask_strides = query, 0, (0, 0, 0, 0)
    if attn_mask is not None:
        kind = 1 if attn_mask.dtype is torch.bool else 2
        mask = attn_mask.expand(batch, heads, queries, key.shape[2])
        mask, mask_strides = mask.view(torch.uint8) if kind == 1 else mask, mask.stride()
    strides = result.stride(), query.stride(), key.stride(), value.stride(), mask_strides
    attended = _program(query.dtype, query.device, query.shape, key.shape, out_width, strides, kind, is_causal, scale)
    attended(result, query, key, value, mask)
    return result


@functools.lru_cache(maxsize=4096)
def _program(
    dtype: torch.dtype,
    device: torch.device,
    query: tuple[int, ...],
    key: tuple[int, ...],
    out_width: int,
    strides: tuple[tuple[int, ...], ...],
    mask: int,
    causal: bool,
    scale: float | None,
) -> Callable[..., None]:
    """The launch for tensors of those shapes and strides, of that dtype on that device; ``mask`` as the kernel's."""
    batch, heads, queries, width = query
    double = dtype is torch.float64
    rows, columns = (SMALL, SMALL) if double else (ROWS, COLUMNS)
    blocks = math.ceil(queries / rows)
    total, most = blocks * batch * heads, most_programs(device)
    numbers = blocks, heads, heads // key[1], queries, key[2], width, out_width, total
    constants: dict[str, Any] = {
        "SCALE": 1 / math.sqrt(width) if scale is None else scale,  # a number would arrive in float32
        "MASK": mask,
        "CAUSAL": causal,
        "DOUBLE": double,
        "ROWS": rows,
        "COLUMNS": columns,
        "WIDTH": max(triton.next_power_of_2(width), SMALL),
        "OUT_WIDTH": max(triton.next_power_of_2(out_width), SMALL),
        "ONCE": total <= most,
    }
    return program(attend, min(total, most), *strides, *numbers, **constants)
