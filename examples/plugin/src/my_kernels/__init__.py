"""A backend of twinkle-kernel's op ``rms_norm``, and an op. Importing this imports twinkle's registry only."""

from __future__ import annotations

from typing import Any

from twinkle.kernel.registry import KernelImpl, register_backend, register_op


def available() -> tuple[bool, str | None]:
    """Whether this machine can run it: the device is there, the package imports, its version is right."""
    return True, None


def accepts(site: Any) -> str | None:
    """Why it doesn't fit one norm of one model. ``site.variant`` is what that one computes, found out by running it."""
    if site.variant.weight is None or site.variant.offset != 0 or site.variant.cast != "before":
        return "mine computes Llama's kind of norm only"
    return None


def load(target: Any, site: Any) -> type:
    """The layer class; imports of what is optional belong here."""
    from my_kernels.rms_norm import MyRMSNorm

    return MyRMSNorm


def load_relu_squared(target: Any, site: Any) -> type:
    """The layer of the op below."""
    from my_kernels.relu_squared import MyReLUSquared

    return MyReLUSquared


def register() -> None:
    """What the entry point names."""
    register_backend("rms_norm", "mine", KernelImpl(load, available, accepts))
    relu_squared = {"mine": KernelImpl(load_relu_squared, available, lambda site: None)}
    register_op("relu_squared", implementations=relu_squared, reference="my_kernels.relu_squared")
