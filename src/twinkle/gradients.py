"""Gradients made of operators that know their derivatives and rules, for the backwards of both levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

# torch.autograd batches gradients by a vmap older than that of torch.func, which doesn't know of it.
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_included = torch._C._dispatch_tls_is_dispatch_key_included
_transforms_active = torch._C._are_functorch_transforms_active


def wants_formula(*grads: torch.Tensor) -> bool:
    """Whether a backward of ours has to use :func:`gradients_by_formula`, since no kernel can compute what is wanted.

    That is a gradient that will be differentiated again (``create_graph=True``), or several at once, under ``vmap``
    (``is_grads_batched=True``, ``jacobian(vectorize=True)``), whose tensors have no memory of their own. A compiler
    traces what the backward does otherwise.

    Args:
        grads: those that a kernel reads as they lie; the memory of a negated one, as that of a conjugate's imaginary
            part is, has the other signs.
    """
    if is_compiling():
        return False
    for grad in grads:
        if grad.is_neg():
            return True
    return torch.is_grad_enabled() or _included(_VMAP) or _transforms_active()


def gradients_by_formula(
    function: Callable[..., Any],
    inputs: tuple[torch.Tensor | None, ...],
    needed: tuple[bool, ...],
    *grads: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``function(*inputs)``, which with ``create_graph=True`` can be differentiated again.

    Args:
        function: made of operators that know their derivatives; returns a tensor, or a tuple of them.
        needed: which inputs' gradients are wanted; None is returned for the others.
        grads: the gradients of the results.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Through aliases: of an input that another one was computed from, only its own part belongs here.
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        results = function(*aliases)
    wanted = [alias for alias, is_needed in zip(aliases, needed, strict=True) if is_needed]
    results = results if isinstance(results, tuple) else (results,)
    # A result may depend on none of the wanted inputs.
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
    outputs, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, seeds, create_graph=again))  # type: ignore[arg-type]
    return tuple(next(found) if is_needed else None for is_needed in needed)


def saved_tensors(ctx: Any, kernel: str) -> tuple[Any, ...]:
    """What a forward of ours saved; where somebody wrote into it since, PyTorch's error says so, and ours whose it was.

    An original may have saved a copy in a wider dtype instead, and allow what our kernel can't.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            error.add_note(
                f"it was saved for the backward of a kernel of twinkle, {kernel}, and the original may have saved a "
                f"copy instead: write x = x + y in the place of x += y, or leave {kernel} out for this model"
            )
        raise


def quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its preparations for transforms of torch.func: of a small function's forward, a third.

    For calls outside of such transforms, of tensors that are no leftovers of one.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]
