"""The same as operators that compilers take as they are: the loss and its gradients in one piece.

Operators can't leave results out, so a gradient that isn't wanted is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from twinkle.loss.chunks import Settings, differentiate, dtype_of_losses, evaluate
from twinkle.loss.token_losses import Recipe

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    settings: Settings,
) -> torch.Tensor:
    """See :func:`twinkle.loss.chunks.evaluate`; differentiable."""
    recipe, reduction, accumulate, chunk, backend = settings
    needed = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    return _evaluate(x, weight, bias, target, class_weight, *recipe, reduction, accumulate, chunk, backend, needed)[0]


@torch.library.custom_op("twinkle::linear_cross_entropy", mutates_args=())
def _evaluate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
    reduction: str,
    accumulate: str,
    chunk: int,
    backend: str,
    wanted: list[bool],
) -> Four:
    recipe = Recipe(ignore_index, label_smoothing, z_loss, scale, softcap)
    settings = Settings(recipe, reduction, accumulate, chunk, backend)  # type: ignore[arg-type]
    loss, found = evaluate(x, weight, bias, target, class_weight, settings, wanted)
    return (loss, *_without_none(found, x))


@_evaluate.register_fake
def _(x: Any, weight: Any, bias: Any, target: Any, class_weight: Any, *options: Any) -> Four:
    *_, reduction, accumulate, _chunk, _backend, wanted = options
    wide = dtype_of_losses(x)
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=wide)
    if reduction == "none":
        wanted = [False] * 3
    dx = torch.empty_like(x) if wanted[0] else None
    dw = torch.empty(weight.shape, dtype=wide if accumulate == "fp32" else weight.dtype, device=x.device)
    db = weight.new_empty(weight.shape[:1], dtype=wide)
    return (loss, *_without_none((dx, dw if wanted[1] else None, db if wanted[2] else None), x))


@torch.library.custom_op("twinkle::linear_cross_entropy_backward", mutates_args=())
def _differentiate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    upstream: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
    accumulate: str,
    chunk: int,
    backend: str,
    wanted: list[bool],
) -> Three:
    recipe = Recipe(ignore_index, label_smoothing, z_loss, scale, softcap)
    settings = Settings(recipe, "none", accumulate, chunk, backend)  # type: ignore[arg-type]
    return _without_none(differentiate(x, weight, bias, target, class_weight, upstream, settings, wanted), x)


@_differentiate.register_fake
def _(x: Any, weight: Any, bias: Any, target: Any, class_weight: Any, upstream: Any, *options: Any) -> Three:
    alike = [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if wanted else None
        for t, wanted in zip((x, weight, bias), options[-1], strict=True)
    ]
    return _without_none(alike, x)


def _without_none(tensors: Any, like: torch.Tensor) -> Three:
    first, second, third = (like.new_empty(0) if tensor is None else tensor for tensor in tensors)
    return first, second, third


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    x, weight, bias, target, class_weight, *options = inputs
    *recipe, reduction, accumulate, chunk, backend, wanted = options
    ctx.options, ctx.wanted = (*recipe, accumulate, chunk, backend, wanted), wanted
    ctx.of_tokens = reduction == "none"
    ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
    if ctx.of_tokens:
        ctx.save_for_backward(x, weight, bias, target, class_weight)
    else:
        ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    if ctx.of_tokens:
        found = _differentiate(*ctx.saved_tensors, upstream, *ctx.options)
    else:
        found = tuple(
            (gradient * upstream.reshape((1,) * gradient.dim())).to(dtype) if wanted else gradient
            for gradient, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
        )
    return (*(g if wanted else None for g, wanted in zip(found, ctx.wanted, strict=True)), *(None,) * 12)


_evaluate.register_autograd(_backward, setup_context=_setup)
