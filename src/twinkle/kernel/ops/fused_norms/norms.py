"""A model's norms as parts of a larger kernel: what they compute, and whether a call may go past them.

The kernel reads a norm's weight and computes what its module would; the module itself isn't called.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from twinkle.kernel import registry
from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
from twinkle.kernel.passed import Passed
from twinkle.kernel.probe import variant_of
from twinkle.kernel.reclass import peel
from twinkle.kernel.targets import Site
from twinkle.reasons import Reason


@dataclass(frozen=True)
class Norm:
    """What a norm was found to be.

    Attributes:
        variant: what it computes, in the terms of the op ``rms_norm``; it has a weight.
        passed: what its module ran, or a kernel of ``rms_norm`` in its place; weight and eps are read at each call.
    """

    variant: RMSNormVariant
    passed: Passed

    @property
    def kind(self) -> dict[str, Any]:
        """The arguments ``offset`` and ``cast`` of the fused ops."""
        return {"offset": self.variant.offset, "cast": self.variant.cast}

    def why_call(self, module: Any) -> str | None:
        """Why the module has to be called after all; None for the ordinary one."""
        reason = self.passed.why_call(module)
        return None if reason is None else f"a norm {reason}"


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
    found = Norm(variant, Passed(cls.forward, op="rms_norm"))
    if not found.passed.runs_in(type(module)):
        return Reason("other-norm", f"its {name} is replaced by another, or called in a way of its own")
    return found
