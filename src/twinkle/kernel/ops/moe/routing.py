"""Sorting the work of a mixture of experts by expert, without waiting for the device.

A *slot* is one choice of one token: slot ``t * K + k`` is token ``t``'s choice ``k``. Sorted slots lie expert by
expert, so that each expert has its rows in one piece; slots that name no expert (under expert parallelism, an index of
``num_experts``) lie behind all of them and belong to nobody.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Route(NamedTuple):
    """Which rows each expert works on.

    Attributes:
        slots: ``[S]`` int64, the slots sorted by expert; tokens of one expert keep their order.
        tokens: ``[S]`` int64, whose slots they are.
        places: ``[T, K]`` int32, where each slot went; -1 for one that names no expert.
        ends: ``[E]`` int32, where each expert's rows end.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor

    @property
    def top_k(self) -> int:
        """How many experts a token chose."""
        return self.places.shape[1]


def route(index: torch.Tensor, experts: int) -> Route:
    """Sorts the slots of ``index [T, K]``, an integer tensor of chosen experts, of which there are ``experts``."""
    chosen = index.reshape(-1)
    nobody = (chosen < 0) | (chosen >= experts)
    chosen = chosen.masked_fill(nobody, experts)
    ordered, slots = torch.sort(chosen, stable=True)
    numbers = torch.arange(experts, device=index.device, dtype=ordered.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    places = torch.empty(slots.shape, dtype=torch.int32, device=index.device)
    places[slots] = torch.arange(slots.numel(), dtype=torch.int32, device=index.device)
    return Route(slots, slots // index.shape[-1], places.masked_fill(nobody, -1).view(index.shape), ends)
