"""The plainest form of what several operators do, for their references: CPU only, slow, by definition."""

from __future__ import annotations

import struct

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


_FORMATS = {
    torch.bool: "?",
    torch.uint8: "B",
    torch.int8: "b",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
    torch.float16: "e",
    torch.float32: "f",
    torch.float64: "d",
    torch.complex64: "ff",
    torch.complex128: "dd",
}


def read_number(tensor: torch.Tensor) -> bool | int | float | complex:
    """The only element of a CPU tensor, made of its bytes."""
    start = tensor.storage_offset() * tensor.element_size()
    found = bytes(tensor.untyped_storage()[start : start + tensor.element_size()])
    if tensor.dtype is torch.bfloat16:  # the upper half of a float32
        return struct.unpack("f", b"\0\0" + found)[0]
    parts = struct.unpack(_FORMATS[tensor.dtype], found)
    return complex(*parts) if tensor.dtype.is_complex else parts[0]


def strides_like(tensor: torch.Tensor, memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor of the same sizes whose elements fill its memory.

    Args:
        tensor: any sizes and strides.
        memory_format: the order of its dimensions in memory; ``torch.preserve_format`` keeps that of ``tensor``.
            Dimensions that it shares between indices (stride 0) stay where they are.
    """
    rank = tensor.dim()
    order = list(range(rank - 1, -1, -1))  # the innermost first
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        order = [1, *range(rank - 1, 1, -1), 0]
    if memory_format is torch.preserve_format:
        for i in range(1, rank):
            place = i
            for other in range(i - 1, -1, -1):
                outer = _is_further_out(tensor, order[other], order[place])
                if outer:
                    order[other], order[place] = order[place], order[other]
                    place = other
                elif outer is False:
                    break
    strides = [0] * rank
    step = 1
    for dimension in order:
        strides[dimension] = step
        step *= max(tensor.shape[dimension], 1)
    return tuple(strides)


def _is_further_out(tensor: torch.Tensor, one: int, other: int) -> bool | None:
    """Whether a dimension lies further out in memory than another; None where that can't be told."""
    if not (tensor.stride(one) and tensor.stride(other)):
        return None
    if tensor.stride(one) != tensor.stride(other):
        return tensor.stride(one) > tensor.stride(other)
    return True if tensor.shape[one] > tensor.shape[other] else None
