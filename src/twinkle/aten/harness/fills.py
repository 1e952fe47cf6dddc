"""What a test tensor's memory holds: made from a name by hashing and integer arithmetic alone.

No generator of PyTorch's, no rounding and no vector code has a part in it, so that the bits are the same with every
version of PyTorch, on every CPU and in every process. Each function takes the name, the number of elements and the
dtype, and returns a CPU tensor of one dimension.
"""

from __future__ import annotations

import hashlib
import math

import torch

_PERIOD = 99991
"""More elements than that repeat the first, a prime number: no layout has it for a stride."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def normal(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """About a standard normal distribution, with all of a number's digits; whole numbers below 100, and truth values.

    A number is the sum of four whole ones, all equally likely, around zero: few enough digits to be exact in the dtype.
    """
    if dtype.is_complex:
        real = torch.float64 if dtype is torch.complex128 else torch.float32
        return torch.view_as_complex(normal(name, 2 * size, real).view(size, 2))
    if not dtype.is_floating_point:
        return _whole(name, size, 2 if dtype is torch.bool else 100).to(dtype)
    bits = -round(math.log2(torch.finfo(dtype).eps))
    total = _stream(name, 4 * size).bitwise_and_(2**bits - 1).view(-1, 4).sum(1) - 2 * (2**bits - 1)
    return _repeated((total.double() * 2.0 ** (1 - bits)).to(dtype), size)


def zeros(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Nothing but zeros."""
    return torch.zeros(size, dtype=dtype)


def large(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The largest number, with both signs where there are both."""
    if dtype is torch.bool:
        return torch.ones(size, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full((size,), torch.iinfo(dtype).max, dtype=dtype)
    signs = _whole(name, size, 2).to(torch.float64) * 2 - 1
    return (signs * torch.finfo(dtype).max).to(dtype)


def special(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Not a number, infinities, the negative zero, the smallest normal number; floating-point dtypes only."""
    _, fraction, infinity, negative = _format(dtype)
    nan = infinity | 1 << (fraction - 1)
    return _of_patterns(name, size, dtype, [nan, infinity, infinity + negative, negative, 1 << fraction])


def edges(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """As :func:`special`, without what is not a number: there are many, and a conversion may give any."""
    _, fraction, infinity, negative = _format(dtype)
    return _of_patterns(name, size, dtype, [infinity, infinity + negative, negative, 1 << fraction, infinity - 1])


def few(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from 0 to 3."""
    return _whole(name, size, 4).to(dtype)


def many(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from 0 to 99,990, as indices into a large table."""
    return _whole(name, size, _PERIOD).to(dtype)


def poison(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a result holds before it is written."""
    pattern = 0x01 if dtype is torch.bool else 0xA5  # other bytes are no booleans
    return torch.full((size * dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)


FILLS = {
    "normal": normal,
    "few": few,
    "many": many,
    "zeros": zeros,
    "large": large,
    "special": special,
    "edges": edges,
    "poison": poison,
}
"""By the name that ``inputs_spec.yaml`` has for ``values``."""

FLOATING_ONLY = ("special", "edges")
"""Which of them other dtypes have no bits for."""


def _format(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Of a floating-point dtype: bits, bits of the fraction, the pattern of infinity, and what the sign adds to one."""
    width, fraction = torch.finfo(dtype).bits, -round(math.log2(torch.finfo(dtype).eps))
    return width, fraction, (2 ** (width - 1 - fraction) - 1) << fraction, -(2 ** (width - 1))


def _of_patterns(name: str, size: int, dtype: torch.dtype, patterns: list[int]) -> torch.Tensor:
    made = torch.tensor(patterns, dtype=torch.int64).to(_SIGNED[dtype.itemsize])
    return made[_whole(name, size, len(patterns))].view(dtype)


def _stream(name: str, count: int) -> torch.Tensor:
    """Whole numbers of 64 bits: SHAKE-256 of the name; Python's own hash differs from process to process."""
    count = min(count, 4 * _PERIOD)
    if not count:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(hashlib.shake_256(name.encode()).digest(8 * count)), dtype=torch.int64)


def _whole(name: str, size: int, below: int) -> torch.Tensor:
    return _repeated((_stream(name, min(size, _PERIOD)) & (2**62 - 1)) % below, size)


def _repeated(numbers: torch.Tensor, size: int) -> torch.Tensor:
    return numbers if len(numbers) == size else numbers.repeat(-(-size // len(numbers)))[:size]
