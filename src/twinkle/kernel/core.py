"""``kernelize``: plan, then apply the plan, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.hub import HubRef, hub
from twinkle.kernel.registry import KernelChoice

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twinkle.kernel.install import default_installer

__all__ = ["HubRef", "default_installer", "hub", "kernelize"]


def __getattr__(name: str) -> Any:
    if name == "default_installer":  # it needs torch, which importing this module doesn't
        from twinkle.kernel.install import default_installer

        return default_installer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def kernelize(
    model: nn.Module,
    mapping: Mapping[Any, KernelChoice | type | Any | HubRef] | None = None,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    verify: bool = False,
) -> nn.Module:
    """Replaces parts of a model by the first kernel of each entry's chain that this machine has and that fits.

    What was done, and why the rest was not, is in :func:`twinkle.kernel.report.report`;
    :func:`twinkle.kernel.undo.unkernelize` brings everything back. The model is seen as it is now: after giving a
    module another activation, say, call it again.

    Args:
        model: changed in place; may be on the meta device.
        mapping: target -> what replaces it; None means :data:`~twinkle.kernel.DEFAULT_KERNEL_CONFIG`, and a mapping is
            used instead of that one (``{**DEFAULT_KERNEL_CONFIG, …}`` extends it). What an earlier call installed at
            sites that it doesn't name stays. A target is an ``nn.Module`` subclass, a dotted
            path (``package.module.Class``, ``….Class.method``, ``package.module.function``) or a logical name; what
            replaces it a :class:`~twinkle.kernel.KernelChoice`, a class, a function, or a :func:`hub` reference.
        device: the device that the model will run on, also by a platform's name (``"npu"``); its own when None.
        strict: raise when an entry of the caller's own is not installed, instead of only reporting it; with ``verify``
            also when it can't be compared.
        verify: compare each kernel with what it replaces, forward and backward, on small inputs; what fails is taken
            out again and the next backend is tried. What can't be compared is installed, with a WARNING and a note.

    Returns:
        the same model.

    Raises:
        ValueError: the model, the mapping or an entry is wrong in itself, or ``strict`` isn't met; nothing was changed.
        Exception: what an installer raised, after everything this call installed was taken back.
    """
    from twinkle.kernel.apply import apply_plan
    from twinkle.kernel.journal import lock
    from twinkle.kernel.plan import make_plan

    with lock:  # a plan is good for the model as it was seen, so nobody may change it before it is applied
        apply_plan(make_plan(model, mapping, device=device), strict=strict, verify=verify)
    return model
