"""Conditions that are asked once for a layout must look at nothing else."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten.arguments import PLAIN, layout
from twinkle.aten.spec import Condition


def looks_at_more(condition: Condition, device: torch.device) -> bool:
    """Whether a condition that isn't ``each_time`` holds of some call that is laid out like the one beyond it."""
    if condition.each_time:
        return False
    try:
        beyond = condition.beyond(device)
    except NotImplementedError:
        return False  # the device has no such tensors
    for number in (0, 1):
        others = tuple(_another(value, number) for value in beyond)
        alike = layout(others, {}) == layout(beyond, {}) is not None
        if alike and not condition.holds(*beyond) and condition.holds(*others):
            return True
    return False


def _another(value: Any, number: int) -> Any:
    """A tensor in memory of its own, of the same layout, without a history; all its elements are that number."""
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return value
    room = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.full((room,), number, dtype=value.dtype, device=value.device)
    return memory.as_strided(value.shape, value.stride())
