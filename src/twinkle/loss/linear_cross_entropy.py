"""Cross-entropy of a linear layer's outputs, without the outputs: logits exist for a chunk of tokens at a time.

For a summed or averaged loss the gradients of a chunk are computed while its logits are there: three matrix products in
all, as without chunks. For ``reduction="none"`` the backward computes the logits again, since only then it knows what
each token's loss is worth.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.compiler import is_compiling

from twinkle.gradients import gradients_by_formula, saved_tensors, wants_formula
from twinkle.loss import traced
from twinkle.loss.chunks import Accumulation, Settings, differentiate, dtype_of_losses, evaluate, mean_of
from twinkle.loss.scaling import scaled_in_place
from twinkle.loss.token_losses import Backend, Recipe, backend_for, by_formula

__all__ = ["linear_cross_entropy"]

CHUNK_ELEMENTS: dict[Accumulation, int] = {"fp32": 240_000_000, "weight": 200_000_000}
"""Logits that exist at once, about: with a vocabulary of 152,000 some 1,500 and 1,300 tokens. Sums in fp32 are read and
written once per chunk, so fewer chunks are faster: on an H200 8192 tokens took 26.0 ms in four chunks, 27.0 in six and
27.8 in eight. Who sums up in the weight's dtype wants little memory, and loses less: 25.0 ms in four, 26.2 in eight."""

CHUNK_ELEMENTS_WRITTEN_OUT = 2**25
"""The same where the formula is written out, which holds several copies of them in fp32."""


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    accumulate: Accumulation = "fp32",
    chunk: int | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """``F.cross_entropy(logits, target)`` of ``logits = x @ weight.T + bias``, differentiable in ``x, weight, bias``.

    The logits are rounded to ``x``'s dtype, as a linear layer does, and everything after that is fp32, as transformers
    does: ``z = scale * logits``, with a soft cap ``z = softcap * tanh(z / softcap)``; then per token, with
    ``lse = logsumexp(z)``, ``w`` the class weights (1 without), V classes, and ``s`` the label smoothing

        (1 - s) * w[y] * (lse - z[y]) + s / V * sum_c w[c] * (lse - z[c]) + z_loss * lse ** 2

    The mean divides by the sum of ``w[y]`` over the tokens that count. Formulas: PyTorch's ``CrossEntropyLoss``; the
    z-loss of PaLM (arXiv:2204.02311, section 5).

    Args:
        x: ``[..., H]``, floating-point.
        weight: ``[V, H]``, of ``x``'s dtype and device.
        target: ``[...]`` int64, class numbers or ``ignore_index``. It isn't shifted.
        bias: ``[V]``, of ``x``'s dtype.
        class_weight: ``[V]``, any floating-point dtype; a constant.
        ignore_index: tokens with that target count for nothing.
        reduction: ``"none"`` for the tokens' losses, ``"sum"``, or ``"mean"``, which is NaN when no token counts.
        label_smoothing: in [0, 1].
        z_loss: factor of ``lse ** 2``.
        scale, softcap: see above; a cap is positive.
        accumulate: where the weight's gradient is summed up over the chunks: in ``"fp32"``, where the error doesn't
            grow with their number, or in the dtype of the ``"weight"``, which takes half of the memory; it is a sum
            over all tokens also for a mean, which fp16 may not hold.
        chunk: the most tokens at a time; chosen from V and the backend when None.
        backend: what computes the losses from a chunk's logits: ``"triton"``, for fp32, bf16 and fp16 on a GPU, or
            ``"torch"``, the formula written out; the better one when None.

    Returns:
        fp32 (fp64 for fp64 inputs): a scalar, or ``target``'s shape for ``"none"``.

    Raises:
        ValueError: shapes, dtypes or options that don't fit.
        IndexError: a class that there isn't; on a GPU, which isn't waited for, that token's loss is NaN instead, or
            with the backend ``"torch"`` PyTorch's device-side assertion fails.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):  # as autocast does around a linear layer
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))  # type: ignore[assignment]
    problem = _problem(
        x, weight, target, bias, class_weight, reduction, label_smoothing, softcap, accumulate, chunk, backend
    )
    if problem is not None:
        raise ValueError(f"linear_cross_entropy: {problem}")
    recipe = Recipe(ignore_index, label_smoothing, z_loss, scale, softcap)
    class_weight = None if class_weight is None else class_weight.to(x.device, dtype_of_losses(x))
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    backend = backend or backend_for(x.device, x.dtype)
    elements = CHUNK_ELEMENTS[accumulate] if backend == "triton" else CHUNK_ELEMENTS_WRITTEN_OUT
    step = chunk or max(1, elements // max(1, weight.shape[0]))
    settings = Settings(recipe, "none" if reduction == "none" else "sum", accumulate, step, backend)
    with torch.autocast(device, enabled=False):
        if is_compiling():
            loss = traced.linear_cross_entropy(rows, weight, bias, targets, class_weight, settings)
        else:
            compute: Any = _LinearCrossEntropy.apply
            loss = compute(rows, weight, bias, targets, class_weight, settings)
        if reduction == "mean":
            loss = mean_of(loss, targets, class_weight, ignore_index)
    return loss.view(target.shape) if reduction == "none" else loss


def _problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    accumulate: str,
    chunk: int | None,
    backend: str | None,
) -> str | None:
    """What doesn't fit; None when all does."""
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; wanted [..., H] and [V, H]"
    if target.shape != x.shape[:-1]:
        return f"target is {tuple(target.shape)}; wanted {tuple(x.shape[:-1])}"
    if target.dtype != torch.int64:
        return f"target is {target.dtype}; wanted torch.int64"
    if x.dtype != weight.dtype or not x.is_floating_point():
        return f"x is {x.dtype} and weight {weight.dtype}; wanted one floating-point dtype"
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            return f"{name} is {tuple(vector.shape)}; wanted {tuple(weight.shape[:1])}"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias is {bias.dtype}; wanted {x.dtype}, as x"
    if reduction not in ("none", "mean", "sum"):
        return f"reduction is {reduction!r}; wanted 'none', 'mean' or 'sum'"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing is {label_smoothing}; wanted 0 to 1"
    if softcap is not None and not softcap > 0:
        return f"softcap is {softcap}; wanted a positive number or None"
    if accumulate not in ("fp32", "weight"):
        return f"accumulate is {accumulate!r}; wanted 'fp32' or 'weight'"
    if chunk is not None and not chunk > 0:
        return f"chunk is {chunk}; wanted a positive number or None"
    if backend not in (None, "triton", "torch"):
        return f"backend is {backend!r}; wanted 'triton', 'torch' or None"
    if backend == "triton" and not is_compiling():
        from twinkle.kernel.ops.triton_support import launchable

        if not launchable(x.device) or x.dtype == torch.float64:
            return f"backend 'triton' can't take {x.dtype} on {x.device.type}; leave it out"
    return None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        settings: Settings,
    ) -> torch.Tensor:
        loss, gradients = evaluate(x, weight, bias, target, class_weight, settings, ctx.needs_input_grad[:3])
        ctx.settings = settings
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        ctx.gradients = None if settings.reduction == "none" else gradients
        ctx.save_for_backward(x, weight, bias, target, class_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # what was computed in the forward has no graph: a part would be missing silently
            raise RuntimeError(
                "linear_cross_entropy: its gradient can't be differentiated again (create_graph=True); "
                "leave 'fused_ce' out for a model that needs it"
            )
        if wants_formula():
            return *_several_at_once(ctx, upstream), *(None,) * 3
        upstream = upstream.resolve_neg()  # kernels read its memory
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # of tokens' losses; or the second backward through a graph that was retained
            x, weight, bias, target, class_weight = saved_tensors(ctx, "linear_cross_entropy")
            wanted = ctx.needs_input_grad[:3]
            upstream = upstream.expand(target.shape)
            found: tuple[torch.Tensor | None, ...] = differentiate(
                x, weight, bias, target, class_weight, upstream, ctx.settings, wanted
            )
        else:
            found = tuple(
                None if gradient is None else scaled_in_place(gradient, upstream, dtype, ctx.settings.backend)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            )
        return (*found, *(None,) * 3)


def _several_at_once(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients under ``vmap``, where nothing can be written in place; all logits exist at once."""
    x, weight, bias, target, class_weight = saved_tensors(ctx, "linear_cross_entropy")
    recipe, reduction, *_ = ctx.settings

    def losses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = by_formula(torch.nn.functional.linear(x, weight, bias), target, class_weight, recipe, None)
        return found if reduction == "none" else found.sum()

    return gradients_by_formula(losses, (x, weight, bias), ctx.needs_input_grad[:3], upstream)
