"""Python's numbers where an operator has a tensor: ``x * 2.5``.

PyTorch makes a tensor without dimensions of such a number and marks it as one that was a number: it then decides
nothing about the result's dtype but its category. The dispatcher hands Python code the number itself, and no function
of PyTorch's Python API sets the mark. So a marked tensor is kept that PyTorch made itself, and its aliases, which have
the mark too, are given memory with other numbers.
"""

from __future__ import annotations

from typing import Any

import torch

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Python's numbers, a bool before the int that it is as well, and the dtypes that PyTorch makes tensors of them in."""

_CPU = torch.device("cpu")
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
for _key in ("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"):
    _MODES = _MODES.add(getattr(torch._C.DispatchKey, _key))
"""Where modes and transforms take calls that are none of theirs."""


def _made_by_autograd(number: Any) -> torch.Tensor:
    """What the derivative of a product keeps of its second factor: the very tensor that PyTorch made of a number."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._ExcludeDispatchKeyGuard(_MODES),
        torch._C.DisableTorchFunction(),
    ):
        one = torch.ones((), device=_CPU, requires_grad=True)
        return (one * number).grad_fn._saved_other  # type: ignore[union-attr]


_MARKED = {kind: _made_by_autograd(kind(1)) for kind in NUMBERS}


def as_tensor(number: Any) -> torch.Tensor:
    """The tensor that PyTorch makes of a number where it expects one: on the CPU, marked as a number."""
    kind = type(number)
    with torch._C._ExcludeDispatchKeyGuard(_MODES), torch._C.DisableTorchFunction():
        made = _MARKED[kind].data  # an alias, made without a call of an operator
        return made.set_(torch.scalar_tensor(number, dtype=NUMBERS[kind], device=_CPU))  # type: ignore[call-overload, no-any-return]
