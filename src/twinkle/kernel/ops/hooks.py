"""Whether anybody has asked to see a module's inputs, outputs or gradients: then it has to be called."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as modules


def hooks_on(module: Any) -> bool:
    """Whether a module has hooks of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def hooks_for_all() -> str | None:
    """Why every module has to be called."""
    found = (
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )
    return "there are hooks for all modules" if found else None
