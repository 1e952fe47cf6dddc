"""A model's norms as parts of a larger kernel: what they compute, and whether a call may go past them.

The kernel reads a norm's weight and computes what its module would; the module itself isn't called. That is right only
as long as the module would do nothing else: so it is asked anew at each call, since hooks and adapters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.compiler import assume_constant_result, is_compiling

from twinkle.kernel import registry
from twinkle.kernel.ops.hooks import hooks_on
from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
from twinkle.kernel.probe import variant_of
from twinkle.kernel.reclass import installed_on, peel
from twinkle.kernel.targets import Site
from twinkle.reasons import Reason


@dataclass(frozen=True)
class Norm:
    """What a norm was found to be.

    Attributes:
        variant: what it computes, in the terms of the op ``rms_norm``; it has a weight.
        original: its class's forward.
        known: ways to call it that its module was met with -> whether they run the original or what serves it.
    """

    variant: RMSNormVariant
    original: Callable[..., Any]
    known: dict[Any, bool] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> dict[str, Any]:
        """The arguments ``offset`` and ``cast`` of the fused ops."""
        return {"offset": self.variant.offset, "cast": self.variant.cast}

    def weight_of(self, module: Any) -> torch.Tensor:
        """A parametrised module, or one of a tool that flattens parameters, has no parameter of that name."""
        name: Any = self.variant.weight
        try:
            return module._parameters[name]  # type: ignore[no-any-return]  # quicker than nn.Module's own way
        except KeyError:
            return getattr(module, name)  # type: ignore[no-any-return]

    def eps_of(self, module: Any) -> float:
        return getattr(module, self.variant.eps)  # type: ignore[no-any-return]

    def why_call(self, module: Any) -> str | None:
        """Why the module has to be called after all; None for the ordinary one."""
        cls: Any = type(module)
        if is_compiling():
            runs = _runs(cls, self.original)
        else:  # what an installed forward is doesn't change
            way = cls.__call__, cls.forward
            known = self.known.get(way)
            runs = self.known.setdefault(way, _runs(cls, self.original)) if known is None else known
        if not runs:
            return "a norm is not, or does not run, what was there when the kernel was installed"
        if "forward" in module.__dict__:
            return "a norm has a forward of its own"
        if hooks_on(module):
            return "a norm has hooks"
        return None


@assume_constant_result
def _runs(cls: Any, original: Callable[..., Any]) -> bool:
    """Whether instances of a class, when called, run that forward, or what the op ``rms_norm`` has put in its place."""
    if cls.__call__ is not nn.Module.__call__:
        return False
    forward = cls.forward
    if forward is original:
        return True
    installed = installed_on(cls)
    method = installed.methods.get("forward") if installed else None
    if method is None or method.function is not forward:
        return False
    return method.original is original and method.row.op == "rms_norm"


def norm_of(module: Any, name: str, like: Site, cache: dict[Hashable, Any]) -> Norm | Reason:
    """What a norm is, found out by running its own code on small inputs.

    Args:
        module: one that a forward calls as a norm.
        name: in a reason.
        like: a site of the model, for device and dtype.
        cache: lives as long as the caller's walk over one model.
    """
    if not isinstance(module, nn.Module):
        return Reason("other-code", f"its {name} is no module")
    cls: Any = peel(type(module))
    site = Site(module, f"{like.name}.{name}", cls, "forward", cls.forward, like.device, like.dtype)
    variant = variant_of(registry.reference_of("rms_norm"), site, cache)
    if isinstance(variant, Reason):
        return Reason("other-norm", f"its {name} is no RMSNorm that is known: {variant}")
    if variant.weight is None:
        return Reason("other-norm", f"its {name} has no weight")
    found = Norm(variant, cls.forward)
    if not _runs(type(module), found.original):
        return Reason("other-norm", f"its {name} is replaced by another, or called in a way of its own")
    return found
