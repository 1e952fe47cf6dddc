"""What ``result_type`` gives."""

from __future__ import annotations

import torch

_BOOL, _INTEGER, _REAL, _COMPLEX = range(4)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: getattr(torch, "bcomplex32", torch.complex64),  # there from torch 2.14 on
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
_REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def result_type_reference(tensor: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """The dtype in which two tensors are added.

    A tensor of no dimensions counts only where its kind (bool, integer, real, complex) is above that of one which has
    some. See "type promotion" in PyTorch's documentation of tensor attributes.
    """
    one, two = tensor.dtype, other.dtype
    if bool(tensor.dim()) != bool(other.dim()):
        ranked, plain = (one, two) if tensor.dim() else (two, one)
        if _kind(plain) <= _kind(ranked):
            return ranked
        return _COMPLEX_OF.get(ranked, plain) if _kind(plain) == _COMPLEX else plain
    return _join(one, two)


def _kind(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return _BOOL
    return _COMPLEX if dtype.is_complex else _REAL if dtype.is_floating_point else _INTEGER


def _join(one: torch.dtype, two: torch.dtype) -> torch.dtype:
    """The smallest dtype that holds both."""
    if one == two:
        return one
    low, high = sorted((one, two), key=_kind)
    if _kind(high) == _COMPLEX:
        return _wider_complex(high, low)
    if _kind(low) != _kind(high):
        return high
    if _kind(high) == _REAL:
        both_half = {one, two} == {torch.float16, torch.bfloat16}  # neither holds the other
        return torch.float32 if both_half else max(one, two, key=_REALS.index)
    if {one, two} == {torch.uint8, torch.int8}:
        return torch.int16
    return max(one, two, key=_INTEGERS.index)


def _wider_complex(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    double = torch.complex128 in (dtype, other) or other is torch.float64
    return torch.complex128 if double else torch.complex64
