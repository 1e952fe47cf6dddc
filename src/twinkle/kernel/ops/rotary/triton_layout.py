"""The layouts of queries, keys and tables that Triton programs which turn heads take, and how they are told them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton

from twinkle.kernel.ops.triton_support import far

Strides = tuple[int, int, int, int]
"""Of batch, token, head and channel."""


def strides_of(tensor: torch.Tensor, heads_at: int) -> Strides:
    """The strides of a 4-D tensor, or of a 3-D one without batch, whose dimension ``heads_at`` is the heads'."""
    strides = tensor.stride()
    if tensor.dim() == 3:
        return 0, strides[0], strides[1], strides[2]
    return strides[0], strides[3 - heads_at], strides[heads_at], strides[3]


def table_strides(table: torch.Tensor) -> tuple[int, int, int]:
    """The strides of batch, token and channel of a table ``[B or 1, S, width]`` or ``[S, width]``."""
    if table.dim() == 2:
        return 0, table.stride(0), table.stride(1)
    return table.stride(0) if table.shape[0] != 1 else 0, table.stride(1), table.stride(2)


def places(
    strides: Sequence[Strides], tables: Sequence[torch.Tensor], heads: int, head_dim: int
) -> tuple[tuple[int, ...], bool]:
    """The arguments that say where everything lies, and whether some tile reaches further than 32 bits count.

    Args:
        strides: the tensors', of up to ``heads`` heads of ``head_dim`` channels.
        tables: cos and sin.
    """
    of_tables = [table_strides(table) for table in tables]
    extents = [extent for s in strides for extent in ((heads, s[2]), (head_dim, s[3]))]
    is_far = far(*extents, *((head_dim, channel) for _, _, channel in of_tables))
    return tuple(itertools.chain(*strides, *of_tables)), is_far


def dealt(heads: Sequence[int], most: int) -> tuple[list[int], int]:
    """How many of each tensor's heads a program takes, at most so many, and how many programs a token needs."""
    each = [min(triton.next_power_of_2(count), most) for count in heads]
    return each, max(triton.cdiv(count, of_each) for count, of_each in zip(heads, each, strict=True))


def _without_heads(shape: torch.Size, heads_at: int) -> tuple[int, ...]:
    return (*shape[:heads_at], *shape[heads_at + 1 :])


def heads_reason(q: torch.Size, k: torch.Size, heads_at: int) -> str | None:
    """Why one program can't take queries and keys of these shapes."""
    if _without_heads(q, heads_at) != _without_heads(k, heads_at):
        return "query and key differ in more than their heads"
    return "an empty tensor" if k[heads_at] == 0 else None


def table_reason(q: torch.Size, heads_at: int, table: torch.Size, width: int, partial: bool = True) -> str | None:
    """Why queries of this shape can't be turned by tables of shape ``table``.

    Args:
        width: of how many channels the tables are.
        partial: whether those may be fewer than a head has.
    """
    if table[-2] != _without_heads(q, heads_at)[-2] or (len(table) == 3 and table[0] not in (1, q[0])):
        return "cos and sin are not as long as the sequence, or as many as the batch"
    if width % 2 or width == 0 or width > q[-1] or (width < q[-1] and not partial):
        return "the table's width doesn't fit the head"
    return None
