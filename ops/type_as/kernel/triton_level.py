"""``type_as`` by the strided copy in Triton."""

from __future__ import annotations

import torch

from twinkle.aten.strided import triton_copy


def type_as_triton(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """See ``aten::type_as``, for two dtypes on one device; the layout of the result is that of ``empty_like``."""
    return triton_copy(torch.empty_like(self, dtype=other.dtype), self)
