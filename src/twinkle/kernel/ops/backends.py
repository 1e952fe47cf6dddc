"""Declaring an op's backends: which module brings each. Nothing is imported before somebody asks."""

from __future__ import annotations

from twinkle.kernel.registry import KernelImpl, lazy_import

TRITON = "twinkle.kernel.ops.triton_support:available"
TORCH = "twinkle.kernel.ops.torch_support:available"
"""What says whether the backends of that name can be used on this machine."""

ON_TRITON = "twinkle.kernel.ops.triton_support:device_reason"
ON_LIGER = "twinkle.kernel.ops.liger_support:device_reason"
ON_NPU = "twinkle.kernel.ops.npu_support:device_reason"
"""``accepts`` of a backend that takes every variant, on a device that its kernels run on."""


def backend(
    module: str, *, load: str = "load", available: str = "available", accepts: str | None = "accepts"
) -> KernelImpl:
    """A backend whose functions are a module's.

    Args:
        module: dotted.
        load, available, accepts: names in it, or ``"another.module:name"``; see :class:`KernelImpl`. ``accepts`` is
            None for a backend that takes every site.
    """

    def named(name: str) -> lazy_import:
        return lazy_import(name if ":" in name else f"{module}:{name}")

    return KernelImpl(named(load), named(available), *(() if accepts is None else (named(accepts),)))
