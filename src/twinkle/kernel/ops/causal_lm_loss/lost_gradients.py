"""Uses of logits that nobody has computed through which a gradient would be lost."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

GRADIENTS = {"grad", "grad_fn", "register_hook", "retain_grad", "retains_grad", "_backward_hooks"}
"""What is asked of a tensor about its gradient."""

LEAVE_OUT = "leave 'fused_ce' out for this model"
"""What to do about a model whose loss asks more of its logits than pending ones can give."""


def check_no_function() -> None:
    """Raises in the forward of an ``autograd.Function`` that the model called. No gradient would get out of it."""
    forwards = set(_forwards(torch.autograd.Function))
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _INSTALLER:
        if frame.f_code in forwards:
            raise RuntimeError(
                "the model hands its logits to an autograd.Function (or a reentrant checkpoint), which would get no "
                f"gradient for them, since they aren't computed yet; {LEAVE_OUT}"
            )
        frame = frame.f_back


_INSTALLER = f"{__package__}.installer"


def _forwards(function: Any) -> Iterator[types.CodeType]:
    """What runs as the forward of each kind of ``autograd.Function``, whose ``apply`` leaves no frame from 2.14 on."""
    for kind in function.__subclasses__():
        yield from _forwards(kind)
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None:
            yield code
