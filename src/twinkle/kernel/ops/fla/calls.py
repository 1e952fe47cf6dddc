"""How transformers' gated delta-net layers call their functions, which are looked up by name in the modeling file.

A backend gives functions by name; each takes the original's arguments and may carry ``accepts_call``.

- ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``: query, key ``[B, T, H, K]`` or, from
  transformers 5.24 on, with a head for several of value's, value ``[B, T, H, V]``, g (the logarithm of the decay) and
  beta ``[B, T, H]``, a state ``[B, H, K, V]`` or None, whether the last state is wanted, whether query and key are to
  be normalised; to ``[B, T, H, V]`` and the state or None.
- ``causal_conv1d_fn``: ``[B, D, T]``, a weight ``[D, W]``, a bias or None, an activation's name or None; to
  ``[B, D, T]``.

Documents packed into one row come with where they begin and end: the rules get ``cu_seqlens``, the convolution finds
``cu_seq_lens_q`` among what else the layer was called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK, RECURRENT, CONVOLUTION = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"

ACTIVATIONS = (None, "silu", "swish")

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""``(query, key, value, g, beta, initial_state, output_final_state, normalised, bounds)`` to output and state."""

Convolution = Callable[..., torch.Tensor]
"""``(x, weight, bias, activation, bounds)`` to the output."""


def functions(
    chunk: Rule | None,
    recurrent: Rule | None,
    convolution: Convolution | None,
    rule_reason: Callable[..., str | None],
    convolution_reason: Callable[..., str | None],
    recurrent_reason: Callable[..., str | None] | None = None,
) -> dict[str, Callable[..., Any]]:
    """The functions of a backend under the names in modeling files, for those that it has.

    Args:
        rule_reason: why a rule's call isn't served, of its tensors and its bounds.
        convolution_reason: the same of the convolution's input, weight, bias, activation and bounds.
        recurrent_reason: of the recurrent rule, where it isn't that of both.
    """
    found: dict[str, Callable[..., Any]] = {}
    if chunk is not None:
        found[CHUNK] = _rule(chunk, rule_reason)
    if recurrent is not None:
        found[RECURRENT] = _rule(recurrent, recurrent_reason or rule_reason)
    if convolution is not None:
        found[CONVOLUTION] = _convolution(convolution, convolution_reason)
    return found


def _rule(rule: Rule, reason: Callable[..., str | None]) -> Callable[..., Any]:
    def call(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = (initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        if query.shape[2] != value.shape[2]:
            query, key = (t.repeat_interleave(value.shape[2] // t.shape[2], dim=2) for t in (query, key))
        return rule(query, key, value, g, beta, *options)

    def accepts_call(  # type: ignore[no-untyped-def]
        query, key, value, g, beta, chunk_size=64, initial_state=None, *args, cu_seqlens=None, **kwargs
    ) -> str | None:
        if cu_seqlens is not None and query.shape[0] != 1:
            return "packed documents in more than one row"
        return reason(query, key, value, g, beta, initial_state, cu_seqlens)

    call.accepts_call = accepts_call  # type: ignore[attr-defined]
    return call


def _convolution(convolution: Convolution, reason: Callable[..., str | None]) -> Callable[..., Any]:
    def call(hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, **kwargs) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return convolution(hidden_states, weight, bias, activation, _shifted(cu_seq_lens_q, hidden_states.shape[-1]))

    def accepts_call(  # type: ignore[no-untyped-def]
        hidden_states, weight, bias=None, activation=None, cu_seq_lens_q=None, **kwargs
    ) -> str | None:
        if activation not in ACTIVATIONS:
            return f"the activation {activation}"
        if cu_seq_lens_q is not None and hidden_states.shape[0] != 1:
            return "packed documents in more than one row"
        return reason(hidden_states, weight, bias, cu_seq_lens_q)

    call.accepts_call = accepts_call  # type: ignore[attr-defined]
    return call


def _shifted(bounds: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Where documents end when a cache put what came before in front of the first one."""
    if bounds is None:
        return None
    before = length - int(bounds[-1])
    return bounds if before == 0 else torch.cat((bounds[:1], bounds[1:] + before))
