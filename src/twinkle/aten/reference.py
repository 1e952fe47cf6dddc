"""The plainest form of what several operators do, for their references: CPU only, slow, by definition."""

from __future__ import annotations

import torch


def copy_by_address(to: torch.Tensor, source: torch.Tensor) -> None:
    """Moves the bits of each element from where ``source`` has it to where ``to`` has it.

    Args:
        to, source: CPU tensors of one shape and dtype; no two elements of ``to`` share memory.
    """
    if to.element_size() > 8:
        to, source = torch.view_as_real(to), torch.view_as_real(source)
    _memory(to).put_(_addresses(to), _memory(source).take(_addresses(source)))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as integers of the item's size."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.empty(0, dtype=integer).set_(tensor.untyped_storage())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    """Of each element, in logical order: the offset of the first and the strides' multiples of its indices."""
    addresses = torch.full(tensor.shape, int(tensor.storage_offset()))
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        along = [1] * tensor.dim()
        along[dimension] = size
        addresses = addresses + (torch.arange(size) * stride).view(along)
    return addresses.reshape(-1)
