"""Gradients that can themselves be differentiated, for the backwards of both levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gradients_with_graph(
    function: Callable[..., Any],
    inputs: tuple[torch.Tensor | None, ...],
    needed: tuple[bool, ...],
    *grads: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``function(*inputs)`` in a form that can be differentiated again: for ``create_graph=True``.

    Args:
        function: made of operators that know their derivatives; returns a tensor, or a tuple of them.
        needed: which inputs' gradients are wanted; None is returned for the others.
        grads: the gradients of the results.
    """
    # Through aliases: of an input that another one was computed from, only its own part belongs here.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wanted = [alias for alias, is_needed in zip(aliases, needed, strict=True) if is_needed]
    results = function(*aliases)
    results = results if isinstance(results, tuple) else (results,)
    # A result may depend on none of the wanted inputs.
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
    outputs, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, seeds, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(found) if is_needed else None for is_needed in needed)
