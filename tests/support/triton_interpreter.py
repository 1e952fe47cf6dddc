"""What Triton's interpreter lacks to run real kernels on a CPU: mended in place, for tests.

Seen in triton 3.6.0, each a gap that either stops a kernel or, worse, gives numbers without meaning:

- a Python float that a kernel gets as an argument stays a float, which has no ``.to``;
- ``libdevice`` functions are stubs that return None;
- bf16 lives in uint16, and arithmetic, ``tl.dot`` and atomics are done on those integers; conversions cut instead of
  rounding to the nearest.

And two things take as long as all the rest: that it looks through all of triton.language at each launch and each call
of a device function; and that coverage, where it is measured, follows it through each operation.

:func:`install` must run before the kernels' modules are imported, since they take libdevice's functions by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_MARK = "_mended_for_tests"


def install() -> None:
    """Mends the interpreter of this process; a second call does nothing."""
    if hasattr(interpreter, _MARK):
        return
    setattr(interpreter, _MARK, True)
    interpreter._implicit_cvt = _floats_become_tensors(interpreter._implicit_cvt)
    for name in ("rsqrt", "exp", "log", "sqrt", "erf"):
        setattr(libdevice, name, functools.partial(_from_tl_math, name))
    libdevice.tanh = _tanh
    InterpreterBuilder.cast_impl = _cast
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, _in_fp32(getattr(InterpreterBuilder, name)))
    for name in ("create_fma", "create_rsqrt", "create_dot"):
        setattr(InterpreterBuilder, name, _in_fp32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_atomic_rmw = _atomic(InterpreterBuilder.create_atomic_rmw)
    interpreter._patch_builtin = _patch_builtin


def _floats_become_tensors(convert: Any) -> Any:
    def implicit(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return convert(argument)

    return implicit


def _from_tl_math(name: str, x: Any) -> Any:
    # Looked up at the call: tl.math's functions run only while a launch has patched them.
    return getattr(tl.math, name)(x)


def _tanh(x: Any) -> Any:
    return tl.tensor(TensorHandle(np.tanh(x.handle.data), x.dtype.scalar), x.type)


def _is_bf16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16 and value.data.dtype == np.uint16


def _widen(value: Any) -> Any:
    """A bf16 handle as an fp32 one; anything else as it is."""
    if not _is_bf16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(data: np.ndarray) -> np.ndarray:
    """fp32 numbers as the bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def _cast(self: Any, source: Any, target: Any) -> Any:
    """Any conversion of numbers; bf16 goes through fp32."""
    data, scalar = _widen(source).data, target.scalar
    data = _round(data) if scalar == tl.bfloat16 else data.astype(interpreter._get_np_dtype(scalar))
    return TensorHandle(data.reshape(source.data.shape), scalar)


def _in_fp32(method: Any) -> Any:
    """A builder's arithmetic on bf16 operands: computed in fp32 and rounded, as the hardware does."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        if not any(_is_bf16(argument) for argument in arguments):
            return method(self, *arguments)
        result = method(self, *(_widen(argument) for argument in arguments))
        # The last operand gives tl.dot and fma their dtype, the first (the same one) all others.
        operands = [argument for argument in arguments if isinstance(argument, TensorHandle)]
        if _is_bf16(operands[-1]):
            bits = result.data if result.data.dtype == bool else _round(result.data)
            return TensorHandle(bits, tl.bfloat16)
        return result

    return call


def _atomic(method: Any) -> Any:
    """Atomic additions to bf16, one lane after the other; the interpreter has them for the wider dtypes only."""

    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if not _is_bf16(value):
            return method(self, operation, pointer, value, mask, *rest)
        assert operation == interpreter._ir.ATOMIC_OP.FADD, "only the addition is mended"
        before = np.zeros(pointer.data.shape, dtype=np.uint16)
        for lane in np.ndindex(pointer.data.shape):
            if not np.broadcast_to(mask.data, pointer.data.shape)[lane]:
                continue
            here = TensorHandle(pointer.data[lane].reshape(1), pointer.dtype)
            always = TensorHandle(np.ones(1, dtype=bool), tl.int1)
            old = self.create_masked_load(here, always, None, None, None, False)
            added = TensorHandle(np.broadcast_to(value.data, pointer.data.shape)[lane].reshape(1), tl.bfloat16)
            self.create_masked_store(here, self.create_fadd(old, added), always, None, None)
            before[lane] = old.data[0]
        return TensorHandle(before, tl.bfloat16)

    return create_atomic_rmw


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As Triton's own: the operations of a module or a class are interpreted until the scope ends."""
    for name in _builtins(package):
        operation = getattr(package, name)
        if tl.core.is_builtin(operation):  # else it is patched: this is a device function's call
            interpreter._patch_attr(package, name, _untraced(operation), builder, scope)


@functools.cache
def _builtins(package: Any) -> list[str]:
    """The names of its operations; looked for at the first launch, when none of them is patched."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _untraced(operation: Any) -> Any:
    """Coverage is of the kernels' own lines; what Triton does for one of them isn't followed."""

    def call(*arguments: Any, **options: Any) -> Any:
        tracer = sys.gettrace()
        if tracer is None:
            return operation(*arguments, **options)
        sys.settrace(None)
        try:
            return operation(*arguments, **options)
        finally:
            sys.settrace(tracer)

    return call
