"""How elements lie in memory: questions that sizes and strides answer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The elements of memory from a tensor's first to its last, both included."""
    return 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@functools.lru_cache(maxsize=4096)
def may_overlap(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements of such a tensor may share memory; False only where it is sure that none do."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill the memory from the first to the last of them, each for itself."""
    return span(sizes, strides) == math.prod(sizes) and not may_overlap(sizes, strides)


def broadcasts(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be expanded to the other."""
    if len(sizes) > len(to):
        return False
    return all(size in (1, wanted) for size, wanted in zip(sizes[::-1], to[::-1], strict=False))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one allocation, overlapping or not."""
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]


def takes_format(rank: int, memory_format: torch.memory_format | None) -> bool:
    """Whether a tensor of that rank can have that memory format."""
    needed = {torch.channels_last: 4, torch.channels_last_3d: 5}
    return memory_format is None or needed.get(memory_format, rank) == rank


def filled(
    number: float, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor in memory of its own that lies like that, all of whose elements are one number."""
    return torch.full((span(sizes, strides),), number, dtype=dtype, device=device).as_strided(sizes, strides)
