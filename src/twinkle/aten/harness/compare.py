"""Whether two results are the same: bits, or numbers within an operator's tolerance; and how they lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten import layouts
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.kernel.verify import allowed_error_used


def shares_memory(one: Any, other: Any) -> bool:
    """Whether two results are tensors in one allocation."""
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and layouts.shares_memory(one, other)


_ULP = torch.finfo(torch.float64).eps


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage as bytes, on the CPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(0, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same elements, bit by bit; any layouts and devices."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu() if tensor.layout is torch.strided else tensor.detach().cpu().to_dense()
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    flat = dense.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride where its size is 1, which a view of other items doesn't take.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def exact(arguments: list[Any]) -> list[Any]:
    """Arguments with their floating-point numbers in fp64."""
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in arguments]


def too_far(result: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor) -> str | None:
    """What is wrong with a result that is rounded otherwise than PyTorch's own; None when nothing is.

    Args:
        result, expected: ours and PyTorch's.
        truth: the same in fp64.
    """
    if same_bits(result, expected):  # those that are no numbers included, of which no two are equal
        return None
    if expected.dtype is torch.float64:  # nothing more exact is at hand: a few hundred roundings
        close = torch.linalg.vector_norm(result.cpu() - expected.cpu()) <= 256 * _ULP * torch.linalg.vector_norm(truth)
        return None if bool(close) else "further from PyTorch's own than by roundings in fp64"
    used = allowed_error_used(result, expected, truth)
    return None if used <= 1 else f"{used:.4g} times the error that is allowed beside PyTorch's own"


def difference(
    spec: OperatorSpec, result: Any, expected: Any, arguments: list[Any], truth: torch.Tensor | None = None
) -> str | None:
    """What is wrong with a result, beside one that is right; None when nothing is.

    Args:
        arguments: those that led to ``result``; an operator's own judge looks at them.
        truth: the result in fp64, of an operator that rounds in an order of its own.
    """
    if not isinstance(expected, torch.Tensor):
        same = type(result) is type(expected) and repr(result) == repr(expected)  # of numbers: all digits, and any NaN
        return None if same else f"{result!r}, expected {expected!r}"
    if not isinstance(result, torch.Tensor):
        return f"{result!r}, expected a tensor"
    for what in ("shape", "dtype", "layout"):
        if getattr(result, what) != getattr(expected, what):
            return f"{what} {getattr(result, what)}, expected {getattr(expected, what)}"
    if expected.layout is not torch.strided:
        return (
            None
            if Semantics.ALLOCATES in spec.semantics or same_bits(result, expected)
            else "other elements than expected"
        )
    if truth is not None:
        return too_far(result, expected, truth)
    if result.stride() != expected.stride():
        return f"strides {result.stride()}, expected {expected.stride()}"
    if Semantics.ALLOCATES in spec.semantics:
        sizes = result.untyped_storage().nbytes(), expected.untyped_storage().nbytes()
        return None if sizes[0] == sizes[1] else f"{sizes[0]} bytes of memory, expected {sizes[1]}"
    if same_bits(result, expected):
        outside = Semantics.IN_PLACE in spec.semantics and not torch.equal(memory_of(result), memory_of(expected))
        return "memory beside the elements was written" if outside else None
    if spec.judge is not None:
        return spec.home.load(spec.judge)(result, *arguments)
    return _wrong(result, expected)


def _wrong(result: torch.Tensor, expected: torch.Tensor) -> str:
    off = (_bits(result) != _bits(expected)).view(result.numel(), -1).any(-1)
    return f"{int(off.sum())} of {result.numel()} elements are wrong, the first at {int(off.nonzero()[0])}"
