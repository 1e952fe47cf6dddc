"""Cross-entropy of a linear layer's outputs, without the outputs: logits exist for a chunk of tokens at a time.

For a summed or averaged loss the gradients of a chunk are computed while its logits are there: three matrix products in
all, as without chunks. For ``reduction="none"`` the backward computes the logits again, since only then it knows what
each token's loss is worth.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from twinkle.loss.token_losses import Recipe, has_program, token_losses

Reduction = Literal["none", "mean", "sum"]
Accumulation = Literal["fp32", "weight"]

CHUNK_ELEMENTS = 2**28
"""Logits that exist at once, about: with a vocabulary of 150,000 some 1,800 tokens, enough for an efficient product."""

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
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    accumulate: Accumulation = "fp32",
    chunk: int | None = None,
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
            grow with their number, or in the dtype of the ``"weight"``, which takes half of the memory.
        chunk: tokens at a time; chosen from V and the device when None.

    Returns:
        fp32 (fp64 for fp64 inputs): a scalar, or ``target``'s shape for ``"none"``.

    Raises:
        ValueError: shapes, dtypes or options that don't fit.
        IndexError: a class that there isn't; on a GPU, which isn't waited for, that token's loss is NaN instead.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):  # as autocast does around a linear layer
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))  # type: ignore[assignment]
    _check(x, weight, target, bias, class_weight, reduction, label_smoothing, softcap, accumulate, chunk)
    recipe = Recipe(ignore_index, label_smoothing, z_loss, scale, softcap)
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    elements = CHUNK_ELEMENTS if has_program(x.device, x.dtype) else CHUNK_ELEMENTS_WRITTEN_OUT
    step = chunk or max(1, elements // max(1, weight.shape[0]))
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropy.apply(rows, weight, bias, targets, class_weight, recipe, reduction, accumulate, step)
    return loss.view(target.shape) if reduction == "none" else loss


def _check(
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
) -> None:
    problems = {
        f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; wanted [..., H] and [V, H]": weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1],
        f"target is {tuple(target.shape)}; wanted {tuple(x.shape[:-1])}": target.shape != x.shape[:-1],
        f"target is {target.dtype}; wanted torch.int64": target.dtype != torch.int64,
        f"x is {x.dtype} and weight {weight.dtype}; wanted one floating-point dtype": x.dtype != weight.dtype
        or not x.is_floating_point(),
        f"reduction is {reduction!r}; wanted 'none', 'mean' or 'sum'": reduction not in ("none", "mean", "sum"),
        f"label_smoothing is {label_smoothing}; wanted 0 to 1": not 0 <= label_smoothing <= 1,
        f"softcap is {softcap}; wanted a positive number or None": softcap is not None and not softcap > 0,
        f"accumulate is {accumulate!r}; wanted 'fp32' or 'weight'": accumulate not in ("fp32", "weight"),
        f"chunk is {chunk}; wanted a positive number or None": chunk is not None and not chunk > 0,
    }
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None:
            wanted = tuple(weight.shape[:1])
            problems[f"{name} is {tuple(vector.shape)}; wanted {wanted}"] = tuple(vector.shape) != wanted
    if bias is not None:
        problems[f"bias is {bias.dtype}; wanted {x.dtype}, as x"] = bias.dtype != x.dtype
    for problem, there in problems.items():
        if there:
            raise ValueError(f"linear_cross_entropy: {problem}")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        recipe: Recipe,
        reduction: Reduction,
        accumulate: Accumulation,
        chunk: int,
    ) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        class_weight = None if class_weight is None else class_weight.to(x.device, wide)
        worth = None
        if reduction != "none":  # what a token's loss is worth, apart from the gradient that will come
            worth = torch.ones((), dtype=wide, device=x.device)
            if reduction == "mean":
                worth = worth / _weight_of_tokens(target, class_weight, recipe.ignore_index, wide)
        needed = ctx.needs_input_grad[:3]
        gradients = _Gradients(x, weight, bias, needed if worth is not None else (False,) * 3, accumulate)
        losses = torch.empty(target.shape, dtype=wide, device=x.device)
        for at in range(0, x.shape[0], chunk):
            part = slice(at, at + chunk)
            logits = torch.nn.functional.linear(x[part], weight, bias)
            upstream = None if worth is None or not gradients else worth.expand(logits.shape[0])
            losses[part] = token_losses(logits, target[part], class_weight, recipe, upstream)
            gradients.add(part, logits)  # logits are their gradient now
        ctx.recipe, ctx.accumulate, ctx.chunk, ctx.reduction = recipe, accumulate, chunk, reduction
        if worth is None:
            ctx.save_for_backward(x, weight, bias, target, class_weight)
            return losses
        ctx.save_for_backward(*gradients.found)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        return losses.sum() * worth

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # what was computed in the forward has no graph: a part would be missing silently
            raise RuntimeError("linear_cross_entropy: its gradient can't be differentiated again (create_graph=True)")
        if ctx.reduction != "none":
            found = [
                None if gradient is None else _scaled(gradient, upstream, dtype)
                for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
            return (*found, *(None,) * 6)
        x, weight, bias, target, class_weight = ctx.saved_tensors
        gradients = _Gradients(x, weight, bias, ctx.needs_input_grad[:3], ctx.accumulate)
        for at in range(0, x.shape[0], ctx.chunk):
            part = slice(at, at + ctx.chunk)
            logits = torch.nn.functional.linear(x[part], weight, bias)
            token_losses(logits, target[part], class_weight, ctx.recipe, upstream[part])
            gradients.add(part, logits)
        found = [None if g is None else g.to(t.dtype) for g, t in zip(gradients.found, (x, weight, bias), strict=True)]
        return (*found, *(None,) * 6)


def _weight_of_tokens(
    target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean divides by, a scalar."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    return (class_weight[target.where(counts, 0)] * counts).sum()


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in another dtype, in one pass."""
    if gradient.dtype == dtype:
        return gradient * factor.to(dtype)
    return torch.mul(gradient, factor.to(gradient.dtype), out=torch.empty_like(gradient, dtype=dtype))


class _Gradients:
    """Gradients of ``x``, ``weight`` and ``bias``, chunk by chunk; None for those that aren't wanted."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        accumulate: Accumulation,
    ) -> None:
        self.x, self.weight = x, weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        dtype = wide if accumulate == "fp32" else weight.dtype
        self.dx = torch.empty_like(x) if wanted[0] else None
        self.dw = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None
        self.db = torch.zeros(weight.shape[:1], dtype=wide, device=weight.device) if wanted[2] else None

    def __bool__(self) -> bool:
        return any(gradient is not None for gradient in self.found)

    @property
    def found(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        return self.dx, self.dw, self.db

    def add(self, part: slice, dlogits: torch.Tensor) -> None:
        """Takes in a chunk's gradient of the logits, ``[tokens, V]``."""
        if self.dx is not None:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if self.dw is not None:
            _add_product(self.dw, dlogits.t(), self.x[part])
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, where ``total`` may be of a wider dtype than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # cuBLAS adds to fp32 what it multiplies in bf16 or fp16
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
