"""``detach`` by other operators of PyTorch."""

from __future__ import annotations

import sys

import torch

_MAKING_A_PARAMETER = torch.nn.Parameter.__new__.__code__
_NEAR = 10
"""So many of our own functions lie between the caller and the kernel, at most."""


def detach_torch(self: torch.Tensor) -> torch.Tensor:
    """See ``aten::detach``: below autograd, which cuts the history and shares the version, it is ``aten::alias``.

    Raises:
        RuntimeError: it is for a ``torch.nn.Parameter``, which PyTorch couldn't make of a tensor that Python has seen.
    """
    if _is_for_a_parameter():
        raise RuntimeError(
            "detach is registered with twinkle.aten, and meanwhile no torch.nn.Parameter can be made, so no module be"
            " built, copied or moved: close() the registration, build the model, then register again"
        )
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.ops.aten.alias(self)


def _is_for_a_parameter() -> bool:
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        if frame.f_code is _MAKING_A_PARAMETER:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
