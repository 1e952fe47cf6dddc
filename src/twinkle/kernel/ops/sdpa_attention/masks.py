"""What is found out about an attention mask once: all layers of a model get the same one."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from twinkle.kernel.ops.sdpa_attention.inputs import Inputs, additive, without_empty_rows
from twinkle.kernel.ops.torch_support import PLAIN, transformed

T = TypeVar("T")


class Remembered(Generic[T]):
    """Mask -> what was found out about it, until PyTorch writes into it. Nothing here holds one: it dies with it.

    What PyTorch doesn't count isn't seen: collectives that receive into a mask, ``mask.data``, somebody's own kernels,
    a captured graph that is replayed. Whoever fills the same mask anew in such a way gives the layers a copy.
    """

    def __init__(self) -> None:
        self._found: MutableMapping[torch.Tensor, tuple[int, T]] = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, mask: torch.Tensor) -> bool:
        return mask in self._found

    def of(self, mask: torch.Tensor, find: Callable[[torch.Tensor], T]) -> T:
        """``find(mask)``, or what it gave before."""
        if mask.is_inference():  # its changes aren't counted at all
            return find(mask)
        known = self._found.get(mask)
        if known is None or known[0] != mask._version:
            with torch.inference_mode(False), _unseen():  # or a later training couldn't save what was found
                known = self._found[mask] = mask._version, find(mask)
        return known[1]


def _unseen() -> AbstractContextManager[Any]:
    """Hides what is done once from modes that see every operator: selective checkpointing counts on the same ones in
    its second forward, and under fake tensors a mask that is none would answer no question."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def can_be_asked(given: Inputs) -> bool:
    """Whether the host may look at a call's mask, and what it sees holds for all layers.

    Not for one query, as a step of generation has: waiting for the device takes longer there than not knowing.
    """
    mask = given.mask
    return (
        mask is not None
        and given.shared
        and mask.shape[-2] > 1
        and type(mask) in PLAIN
        and not mask.requires_grad
        and not mask.is_meta
        and not is_compiling()
        and transformed() is None
        and not _is_filled_by_a_graph(mask)
        and not _is_captured(mask)
    )


def _is_filled_by_a_graph(mask: torch.Tensor) -> bool:
    """Whether a compiler's CUDA graph gave it: the same tensor each time, and what a replay writes isn't counted."""
    return bool(torch._C._is_cached_tensor(mask))  # type: ignore[attr-defined]


def _is_captured(mask: torch.Tensor) -> bool:
    """Whether what is called now becomes part of a graph, in which nobody can wait for the device."""
    if mask.device.type == "cpu":
        return False
    asked = getattr(torch.get_device_module(mask.device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def filled(given: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A call's mask without empty rows, boolean or to be added to the scores; and which rows were empty, if any.

    See :func:`~twinkle.kernel.ops.sdpa_attention.inputs.without_empty_rows`.
    """
    mask, dtype = given.mask, given.query.dtype
    if mask is None:
        return None, None
    if not can_be_asked(given):
        return _filled(mask, dtype)
    changed, empty = _memory(dtype).of(mask, functools.partial(_looked_at, dtype=dtype))
    return mask if changed is None else changed, empty


def _filled(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    full, empty = without_empty_rows(mask, dtype)
    return full if full.dtype == torch.bool else additive(full, dtype), empty


def _looked_at(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As :func:`_filled`, with None for a mask that stays as it is, and where no row is empty."""
    full, empty = _filled(mask, dtype)
    if bool(empty.any()):
        return full, empty
    return None if mask.dtype == torch.bool else full, None


@functools.cache
def _memory(dtype: torch.dtype) -> Remembered[tuple[torch.Tensor | None, torch.Tensor | None]]:
    return Remembered()
