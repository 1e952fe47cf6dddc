"""What a layer saves for its backward, computed again instead, where that is cheap and the memory is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

WORTH_BYTES = 2**24
"""Results of fewer bytes are kept: they would cost more time of the host than the memory is worth."""

_NOTHING = nullcontext()


class _Packed(NamedTuple):
    """What a backward needs: computed from the sources, or their only one. Hooks alone compare its versions."""

    compute: Callable[..., torch.Tensor] | None
    sources: tuple[torch.Tensor, ...]
    versions: list[int]
    shape: torch.Size


def computed_again(
    result: torch.Tensor, compute: Callable[..., torch.Tensor], *sources: torch.Tensor
) -> AbstractContextManager[Any]:
    """Within it, whoever saves ``result`` for a backward saves how to compute it.

    Others' hooks for saved tensors have precedence: within activation checkpointing or offloading, and where PyTorch
    forbids such hooks, everything is saved as ever. A compiler decides for itself what it computes again.

    Args:
        result: contiguous.
        compute: gives ``result`` again from the sources, without a graph.
        sources: kept until the backward in any case. One that was written meanwhile is an error there, as PyTorch's is,
            and so is anything else that was saved.
    """
    if is_compiling() or not torch.is_grad_enabled() or not result.requires_grad or result.nbytes < WORTH_BYTES:
        return _NOTHING
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return _NOTHING
    begin, elements, dtype, version = result.data_ptr(), result.numel(), result.dtype, result._version
    versions = [source._version for source in sources]

    def pack(saved: torch.Tensor) -> _Packed:
        """A linear layer saves its input as a matrix. What was written into since is another result."""
        same = saved.data_ptr() == begin and saved.numel() == elements and saved.is_contiguous()
        if same and saved.dtype == dtype and saved._version == version:
            return _Packed(compute, sources, versions, saved.shape)
        return _Packed(None, (saved,), [saved._version], saved.shape)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: _Packed) -> torch.Tensor:
    compute, sources, versions, shape = packed
    if [source._version for source in sources] != versions:
        raise RuntimeError(
            "what the backward of a gated MLP's last projection needs has been modified by an inplace operation since "
            "the forward"
        )
    return sources[0] if compute is None else compute(*sources).view(shape)
