"""The losses of tokens in one Triton program each: one pass over the logits for the loss, one more for the gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from twinkle.loss.token_losses import Recipe
from twinkle.triton_programs import interpreted, on_device

BLOCK = 4096
"""Logits of a token that are read at a time. On an H200 4096 by 8 warps took 8% less than 8192 by 16."""

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _tanh(x):
    """For Triton's interpreter, whose libdevice has no functions. Where it would cancel it is the series."""
    size = tl.abs(x)
    small = tl.where(size < 0.1, x, 0.0)
    square = small * small
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * size)
    share = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.1, series, tl.where(x < 0.0, -share, share))


@triton.jit
def _capped(x, scale, softcap, SOFTCAP: tl.constexpr):
    """The scaled and capped logits, and the cap's derivative."""
    z = x.to(tl.float32) * scale
    slope = 1.0
    if SOFTCAP:
        share = _tanh(z / softcap) if INTERPRETED else libdevice.tanh(z / softcap)
        z = share * softcap
        slope = 1.0 - share * share
    return z, slope


@triton.jit
def token_losses_kernel(
    logits_ptr, target_ptr, class_weight_ptr, upstream_ptr, loss_ptr,
    classes, stride, upstream_stride, total_weight, ignore_index, hard_share, smoothing, z_loss, scale, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``smoothing`` is divided by the classes in it, ``hard_share`` the rest; ``total_weight`` sums the weights."""
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * stride
    target = tl.load(target_ptr + token)
    counts = target != ignore_index
    target = tl.where(counts, target, 0)
    known_class = (target >= 0) & (target < classes)

    # The loss of a class that there isn't is NaN.
    z_target, _target_slope = _capped(
        tl.load(row + target, mask=known_class, other=float("nan")), scale, softcap, SOFTCAP
    )
    # Smoothing sums up distances from the largest of the first logits: nearly all of one sign, so that nothing cancels.
    base = 0.0
    if SMOOTHING:
        at = tl.arange(0, BLOCK)
        z, _ = _capped(tl.load(row + at, mask=at < classes, other=0.0), scale, softcap, SOFTCAP)
        base = tl.max(tl.where(at < classes, z, float("-inf")), axis=0)
        base = tl.where(base == float("-inf"), 0.0, base)

    # Of each lane the largest so far, the sum of exponentials relative to it, and the weighted distances.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    exponentials = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z, _ = _capped(tl.load(row + at, mask=at < classes, other=0.0), scale, softcap, SOFTCAP)
        z = tl.where(at < classes, z, float("-inf"))
        larger = tl.maximum(largest, z)
        # A lane that has seen nothing but -inf must not subtract it from itself.
        known = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(largest - known) + tl.exp(z - known)
        largest = larger
        if SMOOTHING:
            w = tl.load(class_weight_ptr + at, mask=at < classes, other=0.0) if HAS_WEIGHT else 1.0
            weighted += w * tl.where(at < classes, base - z, 0.0)
    most = tl.max(largest, axis=0)
    known = tl.where(most == float("-inf"), 0.0, most)
    log_sum = tl.log(tl.sum(exponentials * tl.exp(largest - known), axis=0))
    lse = known + log_sum

    hard = hard_share
    if HAS_WEIGHT:
        hard *= tl.load(class_weight_ptr + target, mask=known_class, other=0.0)
    soft = smoothing * total_weight
    # Not by z - lse: what is lost in it where both are large would be a relative error of every probability.
    loss = hard * (known - z_target + log_sum) + z_loss * lse * lse
    if SMOOTHING:
        loss += soft * (known - base + log_sum) + smoothing * tl.sum(weighted, axis=0)
    tl.store(loss_ptr + token, tl.where(counts, loss, 0.0))

    if GRADIENT:
        worth = tl.load(upstream_ptr + token * upstream_stride) * scale
        factor = hard + soft + 2.0 * z_loss * lse
        for start in range(0, classes, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(row + at, mask=at < classes, other=0.0, eviction_policy="evict_first")  # for the last time
            z, slope = _capped(logits, scale, softcap, SOFTCAP)
            gradient = tl.exp(z - known - log_sum) * factor
            if SMOOTHING:
                w = tl.load(class_weight_ptr + at, mask=at < classes, other=0.0) if HAS_WEIGHT else 1.0
                gradient -= smoothing * w
            gradient -= tl.where(at == target, hard, 0.0)
            gradient = tl.where(counts, gradient * slope * worth, 0.0)
            tl.store(
                row + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < classes, eviction_policy="evict_first"
            )


def token_losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    recipe: Recipe,
    upstream: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`twinkle.loss.token_losses.token_losses`; fp32, bf16 and fp16."""
    tokens, classes = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return losses
    total = float(classes) if class_weight is None or not recipe.label_smoothing else float(class_weight.sum())
    block = min(BLOCK, triton.next_power_of_2(classes))
    with on_device(logits):
        token_losses_kernel[(tokens,)](
            logits, target, class_weight, upstream, losses,
            classes, logits.stride(0), 0 if upstream is None else upstream.stride(0), total, recipe.ignore_index,
            1.0 - recipe.label_smoothing, recipe.label_smoothing / classes, recipe.z_loss, recipe.scale,
            recipe.softcap or 0.0,
            HAS_WEIGHT=class_weight is not None, SMOOTHING=recipe.label_smoothing != 0.0,
            SOFTCAP=recipe.softcap is not None, GRADIENT=upstream is not None,
            BLOCK=block, num_warps=max(1, min(8, block // 512)),
            # A fused multiplication keeps digits that its rounded twin has lost: the two would no longer cancel.
            enable_fp_fusion=recipe.label_smoothing == 0.0,
        )  # fmt: skip
    return losses
