"""The ``torch`` backend of ``fla``: PyTorch's operators on any device, with packed documents kept apart.

Transformers' own PyTorch functions drop the bounds of packed documents, so states leak from one to the next; from 5.24
on they refuse them. And where flash-linear-attention is installed transformers calls it on a CPU too, where it fails:
this is the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinkle.kernel.ops.fla.calls import functions
from twinkle.kernel.ops.fla.reference import causal_convolution, chunked, recurrent


def load(target: Any) -> dict[str, Callable[..., Any]]:
    """Functions by name; every call is served."""
    return functions(chunked, recurrent, causal_convolution, lambda *tensors: None, lambda *tensors: None)
