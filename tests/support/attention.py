"""Attention calls of every kind, and transformers' eager attention, which says what they mean."""

from __future__ import annotations

import itertools
import statistics
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from twinkle.kernel.exact import KeepFloat64
from twinkle.kernel.verify import allowed_error_used

HEADS, CHANNELS, BATCH = 4, 16, 2

MASKS = (
    "none",
    "boolean",
    "additive",
    "graded",
    "sliding",
    "one row for all queries",
    "one for all texts",
    "rows without keys",
    "bias",
    "bias and mask",
    "bias and numbers",
)
LENGTHS = ((1, 1), (1, 9), (7, 7), (5, 9))


class Case(NamedTuple):
    """One kind of call.

    Attributes:
        mask: one of MASKS.
        causal: of the argument and of the module; None where the argument is left out.
        groups: heads of queries for each of keys.
        lengths: of queries and of keys.
    """

    mask: str
    causal: tuple[bool | None, bool]
    groups: int
    lengths: tuple[int, int]


CASES = [
    Case(*case)
    for case in itertools.product(MASKS, ((None, True), (None, False), (False, True), (True, False)), (1, 2), LENGTHS)
]


def rows_without_keys(mask: torch.Tensor) -> torch.Tensor:
    """``[B, 1, Sq, 1]``"""
    kept = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~kept.any(-1, keepdim=True)


def module_for(case: Case) -> Any:
    groups, causal = case.groups, case.causal[1]
    return types.SimpleNamespace(num_key_value_groups=groups, is_causal=causal, training=False)


def call(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Query, key and value, and the other arguments by name."""
    generator = torch.Generator().manual_seed(seed)
    length, keys = case.lengths

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query = random(BATCH, HEADS, length, CHANNELS)
    key, value = (random(BATCH, HEADS // case.groups, keys, CHANNELS) for _ in range(2))
    options = {"is_causal": case.causal[0], "scaling": 0.2}
    # What is kept: at least the last key of the past and oneself; the others at random, or in a window.
    at = torch.arange(length)[:, None] + (keys - length)
    kept = torch.rand(BATCH, 1, length, keys, generator=generator) < 0.6
    kept |= torch.arange(keys) == at
    if case.mask == "sliding":
        kept = ((torch.arange(keys) <= at) & (torch.arange(keys) > at - 3)).expand(BATCH, 1, length, keys).clone()
    if case.mask == "rows without keys":
        kept[0, :, 0] = False
    if case.mask == "one row for all queries":  # padding, as of a layer that looks both ways
        kept = kept[:, :, -1:]
    if case.mask == "one for all texts":
        kept = kept[:1]
    mask: torch.Tensor | None = kept.to(device)
    lowest = torch.finfo(dtype).min
    if case.mask in ("none", "bias"):
        mask = None
    elif case.mask in ("additive", "bias and numbers"):
        mask = torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, lowest).to(device)
    elif case.mask == "graded":
        mask = (torch.arange(keys) - at)[None, None].to(device, dtype) * 0.5
    if "bias" in case.mask:
        options["position_bias"] = random(1, HEADS, length, keys)
    return (query, key, value), {"attention_mask": mask, **options}


def eager(case: Case, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> torch.Tensor:
    """Transformers' eager attention, given the mask that its masking code makes of the arguments: one to be added."""
    query, key, value = tensors
    mask, bias = options["attention_mask"], options.get("position_bias")
    length, keys, lowest = query.shape[2], key.shape[2], torch.finfo(query.dtype).min
    causal = case.causal[1] if options["is_causal"] is None else options["is_causal"]
    if mask is None and causal and length > 1:
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)
    if bias is not None:
        mask = bias if mask is None else (bias + mask).clamp(min=lowest)
    return eager_attention_forward(module_for(case), query, key, value, mask, options["scaling"])[0]


def judged(function: Any, case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The share of the allowed error that the output and each gradient use, the original being eager attention.

    The median of three inputs: some gradients have so few elements that chance decides about one.
    """
    shares = [_judged_once(function, case, call(case, dtype, device, seed)) for seed in range(3)]
    return {name: statistics.median(share[name] for share in shares) for name in shares[0]}


def _judged_once(function: Any, case: Case, given: tuple[tuple[torch.Tensor, ...], dict[str, Any]]) -> dict[str, float]:
    tensors, options = given
    exact_options = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()}
    runs = [
        _run(lambda *t, **o: function(module_for(case), *t, **o)[0], tensors, options),
        _run(lambda *t, **o: eager(case, t, o), tensors, options),
    ]
    with KeepFloat64():
        runs.append(_run(lambda *t, **o: eager(case, t, o), tuple(t.double() for t in tensors), exact_options))
    names = ["output", "query", "key", "value", *(["position_bias"] if "position_bias" in options else [])]
    found = {name: tensors for name, *tensors in zip(names, *runs, strict=True)}
    return {name: _share(*tensors, size=found["value"][2].norm()) for name, tensors in found.items()}


def _share(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """By the judgement; but with one key the scores' gradients are nothing but rounding, which is told from nothing by
    the size of the values' gradient."""
    if exact.abs().max() < 1e-12 * size:
        return float(ours.double().norm() / (torch.finfo(ours.dtype).eps * size))
    return allowed_error_used(ours, theirs, exact)


def _run(function: Any, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Iterator[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options = dict(options)
    if "position_bias" in options:
        options["position_bias"] = options["position_bias"].detach().clone().requires_grad_()
        leaves.append(options["position_bias"])
    out = function(*leaves[:3], **options)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    if options["attention_mask"] is not None:
        # Nobody looks at rows without keys. Eager attention would give their query and keys gradients, although the
        # result doesn't depend on them.
        grad = grad.masked_fill(rows_without_keys(options["attention_mask"]).transpose(1, 2), 0)
    return iter([out.detach(), *torch.autograd.grad(out, leaves, grad)])
