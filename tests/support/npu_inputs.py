"""What tests of the npu backends give them."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.kernel.targets import Site


def site(variant: Any, module: Any = None, original: Any = None) -> Site:
    device = torch.device("npu")
    return Site(module, "here", type(module), "forward", original, device, torch.bfloat16, variant)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to("npu", dtype)
