"""What the tests of the torch backends share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twinkle.kernel.targets import Site


def site(variant: object, device: str = "cpu") -> Site:
    return Site(None, "somewhere", None, "attribute", None, torch.device(device), torch.float32, variant)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a compiler traces it, with nothing left of earlier ones."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")
