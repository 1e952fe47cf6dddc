"""Backends that every op has, made from its reference: nothing is written per op."""

from __future__ import annotations

import functools
import shutil
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twinkle.kernel.registry import KernelImpl, OpDefinition, register_backend_for_every_op
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Example:
    """Inputs on which two implementations of one site can be compared.

    Attributes:
        module: a stand-in to call a method on; None for a function.
        args, kwargs: fp32 CPU tensors and plain values; whoever runs them casts and moves them.
        fixed: positions in ``args`` of tensors that nobody differentiates, e.g. tables of cosines.
    """

    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] = ()


def layer(
    name: str, forward: Callable[..., Any], accepts_call: Callable[..., str | None] | None = None
) -> type[nn.Module]:
    """A layer class as the Hugging Face Hub defines it: an ``nn.Module`` that brings a ``forward`` and nothing else."""
    from torch import nn

    namespace: dict[str, Any] = {"forward": forward, "__doc__": forward.__doc__}
    if accepts_call is not None:
        namespace["accepts_call"] = staticmethod(accepts_call)
    return type(name, (nn.Module,), namespace)


def no_reference(op: OpDefinition) -> Reason | None:
    """The reason why a backend can't be derived from this op."""
    return None if op.reference else Reason("no-reference", f"op {op.name} has no reference to derive a backend from")


def reference_impl(op: OpDefinition) -> KernelImpl:
    """The reference itself as a backend."""

    def available() -> tuple[bool, Reason | None]:
        missing = no_reference(op)
        return missing is None, missing

    return KernelImpl(lambda target, site: op.load_reference().build(site.variant), available)


def inductor_impl(op: OpDefinition) -> KernelImpl:
    """The reference through ``torch.compile``: a fused kernel for any device with a working compiler.

    Opt-in: the first call of each variant, dtype and number of dimensions compiles, which takes seconds.
    """

    def available() -> tuple[bool, Reason | None]:
        missing = no_reference(op) or _no_compiler()
        return missing is None, missing

    def load(target: Any, site: Any) -> Any:
        reference: Any = op.load_reference().build(site.variant)
        if not isinstance(reference, type):
            return _compiled(reference)
        compiled = _compiled(cast("type[nn.Module]", reference).forward)
        # A compiled callable is no function, so it wouldn't bind as a method.
        return layer(f"Inductor{reference.__name__}", lambda self, *args, **kwargs: compiled(self, *args, **kwargs))

    return KernelImpl(load, available)


def _compiled(function: Any) -> Callable[..., Any]:
    """``function`` through ``torch.compile``, with a code object of its own.

    The compiler counts variants by code object and, beyond eight, runs the rest uncompiled; what other models compiled
    from the same lines must not count.
    """
    import torch

    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(functools.update_wrapper(own, function))


def _no_compiler() -> Reason | None:
    from torch._inductor import config

    candidates = [name for name in config.cpp.cxx if name] if isinstance(config.cpp.cxx, tuple) else [config.cpp.cxx]
    if not any(shutil.which(name) for name in candidates):
        looked_for = ", ".join(candidates)
        return Reason("no-compiler", f"no C++ compiler found (looked for {looked_for})", "install g++ or set CXX")
    header = Path(sysconfig.get_path("include"), "Python.h")  # every compiled kernel includes it
    if not header.exists():
        return Reason("no-headers", f"Python's C headers are missing (looked for {header})", "install python3-dev")
    return None


register_backend_for_every_op("inductor", inductor_impl)
