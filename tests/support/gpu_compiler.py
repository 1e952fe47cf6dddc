"""Compiling Triton programs for a GPU, for which none is needed: what the interpreter lets pass may not compile."""

from __future__ import annotations

from typing import Any


def compiled_for_gpu(function: Any, numbers: dict[str, Any], constants: dict[str, Any], **options: Any) -> Any:
    """A program for compute capability 9.0.

    Args:
        function: a ``@triton.jit`` function.
        numbers: parameter -> type, e.g. ``"*bf16"`` or ``"i32"``; parameters of neither kind are ``i32``.
        constants: compile-time parameters, and None for a tensor that isn't there.
        options: ``num_warps``, ``num_stages``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else numbers.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
