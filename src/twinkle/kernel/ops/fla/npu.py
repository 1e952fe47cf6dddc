"""The ``npu`` backend of ``fla``: torch_npu's chunked gated delta rule, where no gradient is wanted.

The wheel publishes no backward for it, so a training step is flash-linear-attention's (the backend ``fla``, which comes
first) or the original's. Nor does it publish the layout: documents one after the other, as ``actual_seq_lengths``
suggests, and either order of a state's dimensions are tried on a small input, and another result is no kernel.

The convolution before the rule is PyTorch's on packed documents, which transformers' own lets see each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.fla.calls import functions
from twinkle.kernel.ops.fla.library import switched_off
from twinkle.kernel.ops.fla.reference import causal_convolution, recurrent, unit
from twinkle.kernel.ops.npu_support import call_reason, device_reason, npu_function
from twinkle.kernel.probe import random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

NO_GRADIENT = "torch_npu publishes no gradient of the gated delta rule"
SEE_EACH_OTHER = (
    "and by transformers' own the packed documents see each other: map 'fla' to KernelChoice('fla', ('fla', 'torch'))"
)
NOT_PACKED = "nothing is packed: transformers' convolution computes the same"

_OPTIONS = ("beta", "initial_state", "actual_seq_lengths", "scale", "g")
available = functools.partial(npu_support.available, {"npu_chunk_gated_delta_rule": _OPTIONS})


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    wanted: bool,
    normalised: bool,
    bounds: torch.Tensor | None,
    value_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule by torch_npu; ``value_first`` says that a state of its is ``[V, K]``."""
    batch, length, heads, width = key.shape
    if normalised:
        query, key = (unit(tensor.float()).to(value.dtype) for tensor in (query, key))
    if bounds is None:
        lengths = torch.full((batch,), length, dtype=torch.int32, device=key.device)
    else:
        lengths = torch.diff(bounds).int()
    if state is None:
        state = value.new_zeros(len(lengths), heads, width, value.shape[-1])
    flat = [tensor.flatten(0, 1).contiguous() for tensor in (query, key, value)]
    out, last = npu_function("npu_chunk_gated_delta_rule")(
        *flat,
        beta=beta.flatten(0, 1).to(value.dtype).contiguous(),
        initial_state=_turned(state.to(value.dtype), value_first),
        actual_seq_lengths=lengths,
        scale=width**-0.5,
        g=g.flatten(0, 1).float().contiguous(),
    )
    return out.view(value.shape), _turned(last, value_first).float() if wanted else None


def _turned(state: torch.Tensor, value_first: bool) -> torch.Tensor:
    return (state.transpose(-1, -2) if value_first else state).contiguous()


def state_has_value_first(device: torch.device) -> bool:
    """The order of a state's dimensions, by two documents on a small input.

    Raises:
        RuntimeError: neither order gives the rule's results.
    """
    query, key, value = (random_tensor(1, 20, 2, 16, seed=seed) for seed in (1, 2, 3))
    g, beta = -random_tensor(1, 20, 2, seed=4).abs(), random_tensor(1, 20, 2, seed=5).sigmoid()
    state, bounds = random_tensor(2, 2, 16, 16, seed=6), torch.tensor([0, 12, 20], device="cpu")
    expected = recurrent(query, key, value, g, beta, state, True, True, bounds)
    q, k, v = (tensor.to(device, torch.bfloat16) for tensor in (query, key, value))
    decay, rate, start, ends = (tensor.to(device) for tensor in (g, beta, state, bounds))
    for value_first in (False, True):
        found = chunked(q, k, v, decay, rate, start, True, True, ends, value_first)
        if all(_close(ours, right) for ours, right in zip(found, expected, strict=True)):
            return value_first
    raise RuntimeError("npu_chunk_gated_delta_rule gives other results than the rule, in either order of a state")


def _close(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert found is not None and expected is not None
    return torch.allclose(found.cpu().float(), expected, rtol=5e-2, atol=5e-2)


def accepts(site: Site) -> Reason | None:
    """A model on an NPU, unless the switch is off."""
    return device_reason(site) or switched_off(site)


def load(target: Any, site: Site) -> dict[str, Callable[..., Any]]:
    """The chunked rule, and the convolution of packed documents; torch_npu's own convolution and recurrent rule write
    states in place."""
    rule = functools.partial(chunked, value_first=state_has_value_first(site.device))
    return functions(rule, None, causal_convolution, _refusal, _convolution_refusal)


def _convolution_refusal(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why a convolution's call isn't served."""
    bias, bounds = others
    return NOT_PACKED if bounds is None else call_reason(x, weight, bias, one_dtype=False)


def _refusal(query: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why a rule's call isn't served."""
    key, value, g, beta, state, bounds = others
    reason = call_reason(query, key, value) or call_reason(query, g, beta, state, one_dtype=False)
    if reason is not None:
        return reason
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, g, beta)):
        return NO_GRADIENT if bounds is None else f"{NO_GRADIENT}; {SEE_EACH_OTHER}"
    return None if query.dtype == torch.bfloat16 else "the dtype isn't bf16"
