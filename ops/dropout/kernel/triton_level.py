"""``dropout`` in Triton: the mask is never stored, but drawn again from the same seed for the gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from twinkle.aten.gradients import is_plain
from twinkle.aten.launch import most_programs, program
from twinkle.aten.spec import WithPullback
from twinkle.aten.strided import triton_copy

from .programs import drop

BLOCK = 512


def dropout_triton(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """See ``aten::dropout``, for 0 < p < 1 in training and an input whose elements lie side by side."""
    return _drop(input, p, _draw_seed(input.device))


def dropout_triton_with_pullback(input: torch.Tensor, p: float, train: bool) -> WithPullback:
    """The result, the gradient of ``input`` from that of the result, and the seed that it takes."""
    seed, strides = _draw_seed(input.device), input.stride()
    return _drop(input, p, seed), lambda grad, seed: (_drop_again(grad, p, seed, strides),), seed


def _drop_again(grad: torch.Tensor, p: float, seed: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same elements dropped of another tensor; the mask belongs to positions in the input's memory."""
    if is_plain(grad):
        return _Again.apply(grad, p, seed, strides)  # type: ignore[no-any-return]
    ones = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).fill_(1)
    return grad * _drop(ones, p, seed)


class _Again(torch.autograd.Function):
    """Its own gradient is the same once more."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, p: float, seed: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.rest = p, seed, strides
        if grad.stride() != strides:
            empty = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
            grad = triton_copy(empty, grad)
        return _drop(grad, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _drop_again(grad, *ctx.rest), None, None, None


def _draw_seed(device: torch.device) -> torch.Tensor:
    """One number from PyTorch's own generator, left on the device: it obeys ``torch.manual_seed``, nothing waits."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _drop(source: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(source)
    _program(source.dtype, source.device, source.numel(), p)(result, source, seed)
    return result


@functools.lru_cache(maxsize=4096)
def _program(dtype: torch.dtype, device: torch.device, total: int, p: float) -> Callable[..., None]:
    """The launch for tensors of that dtype on that device."""
    turns, most = math.ceil(total / (4 * BLOCK)), most_programs(device)
    wide = total + 4 * BLOCK * min(turns, most) >= 2**31
    threshold = min(round(p * 2**32), 2**32 - 1)
    constants = {"SCALE": 1 / (1 - p), "WIDE": wide, "ONCE": turns <= most, "BLOCK": BLOCK}
    return program(drop, min(turns, most), total, THRESHOLD=threshold, **constants)
