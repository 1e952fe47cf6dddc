"""Memory that a kernel allocates, filled with something recognisable: what it doesn't write shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PATTERNS = (0xA5, 0x5A, 0xFF)
"""Bytes; the last makes every floating-point number a NaN."""

_ALLOCATING = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


class _Poison(TorchFunctionMode):
    def __init__(self, pattern: int) -> None:
        super().__init__()
        self._pattern = pattern

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATING and result.device.type != "meta":
            fill(result, self._pattern)
        return result


def fill(tensor: torch.Tensor, pattern: int) -> None:
    """Makes every byte of a tensor's memory the pattern."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(pattern)


@contextmanager
def poisoned(pattern: int) -> Iterator[None]:
    """While inside, whatever this thread's Python code allocates is filled with the pattern."""
    with _Poison(pattern):
        yield
