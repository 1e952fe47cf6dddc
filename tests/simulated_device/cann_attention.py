"""torch_npu's attention, with its gradient, and gated delta rule on the CPU, and what the chip is known to refuse."""

from __future__ import annotations

from typing import Any

import torch

from tests.simulated_device.cann import one_dtype, require, wide

PATTERN = 2048


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Any, ...]:
    assert pre_tockens == next_tockens == 2147483647 and not inner_precise and padding_mask is None, "isn't simulated"
    assert prefix is None and actual_seq_qlen is None and actual_seq_kvlen is None, "isn't simulated"
    seed = int(torch.randint(2**31, ()))
    _check(query, key, value, head_num, input_layout, pse, atten_mask, sparse_mode)
    groups = head_num // key.shape[1]
    k, v = (wide(tensor).repeat_interleave(groups, 1) for tensor in (key, value))
    weights, kept = _weights(wide(query), k, pse, atten_mask, scale, keep_prob, sparse_mode, seed)
    out, statistics = weights * kept @ v, torch.zeros(*query.shape[:3], 8)
    return out.to(query.dtype), statistics, statistics.clone(), torch.empty(0), seed, 0, query.numel()


def fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    seed: int = 0,
    numels: int = 0,
    sparse_mode: int = 0,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    assert not any(more.values()), "isn't simulated"
    _check(query, key, value, head_num, input_layout, pse, atten_mask, sparse_mode)
    one_dtype(query, dy)
    require(softmax_max is not None and softmax_sum is not None and softmax_in is not None, "what the forward returned")
    require(attention_in is not None and attention_in.shape == query.shape, "attention_in isn't the forward's result")
    require(numels == query.numel(), "numels isn't the forward's")
    groups = head_num // key.shape[1]
    q, k, v, grad = (wide(tensor) for tensor in (query, key, value, dy))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights, kept = _weights(q, k, pse, atten_mask, scale_value, keep_prob, sparse_mode, seed)
    dweights = grad @ v.transpose(2, 3) * kept
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale_value
    found = [
        dscores @ k,
        _summed(dscores.transpose(2, 3) @ q, groups),
        _summed((weights * kept).transpose(2, 3) @ grad, groups),
        torch.empty(0) if pse is None else dscores,
    ]
    return (*(gradient.to(query.dtype) for gradient in found), torch.empty(0))


def _summed(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Over the heads of queries that share one of keys."""
    return gradient.unflatten(1, (-1, groups)).sum(2)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    layout: str,
    pse: torch.Tensor | None,
    masked: torch.Tensor | None,
    mode: int,
) -> None:
    one_dtype(query, key, value, *([] if pse is None else [pse]))
    require(layout == "BNSD" and query.dim() == key.dim() == value.dim() == 4, f"layout {layout}")
    batch, heads, length, width = query.shape
    require(head_num == heads <= 256 and heads % key.shape[1] == 0, f"head_num {head_num}")
    require(key.shape == value.shape and key.shape[0] == batch and key.shape[3] == width <= 512, "shapes")
    require(query.is_contiguous() and key.is_contiguous() and value.is_contiguous(), "BNSD, one after the other")
    scores = (length, key.shape[2])
    if pse is not None:
        require(pse.shape in ((batch, heads, *scores), (1, heads, *scores)), f"pse of {tuple(pse.shape)}")
    require(mode in (0, 2), f"sparse_mode {mode}")
    if mode == 2:
        require(masked is not None and masked.shape == (PATTERN, PATTERN), "the pattern of sparse_mode 2")
    if masked is not None:
        require(masked.dtype in (torch.bool, torch.uint8), f"atten_mask of {masked.dtype}")
        shapes = {scores, (1, 1, *scores), (batch, 1, *scores), (batch, heads, *scores), (PATTERN, PATTERN)}
        require(tuple(masked.shape) in shapes and masked.is_contiguous(), f"atten_mask of {tuple(masked.shape)}")


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    pse: torch.Tensor | None,
    masked: torch.Tensor | None,
    scale: float,
    keep: float,
    mode: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention weights, and the factor by which dropout changes each.

    A row whose keys are all masked is NaN: what the chip makes of it isn't published. Nor is whether ``pse`` is scaled.
    """
    scores = query @ key.transpose(2, 3)
    if pse is not None:
        scores = scores + wide(pse)
    scores = scores * scale
    if mode == 2:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    elif masked is not None:
        scores = scores.masked_fill(masked.cpu().bool(), float("-inf"))
    kept = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) < keep
    return scores.softmax(-1), kept / keep


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents one after the other, ``[T, H, D]``. That a state is ``[V, K]`` isn't published."""
    assert beta is not None and initial_state is not None and g is not None and scale is not None, "isn't simulated"
    require(query.dtype == torch.bfloat16, f"query of {query.dtype}")
    one_dtype(query, key, value, beta, initial_state)
    require(query.dim() == 3 and g.dtype == torch.float32, "[T, H, D], and g in fp32")
    assert actual_seq_lengths is not None
    require(actual_seq_lengths.dtype == torch.int32, f"lengths of {actual_seq_lengths.dtype}")
    q, k, v, rate, decay = (wide(tensor) for tensor in (query, key, value, beta, g))
    outs, states, at = [], [], 0
    for length, start in zip(actual_seq_lengths.tolist(), wide(initial_state), strict=True):
        state = start
        for t in range(at, at + length):
            state = state * decay[t].exp()[:, None, None]
            learned = rate[t][:, None] * (v[t] - (state * k[t][:, None]).sum(-1))
            state = state + learned[..., None] * k[t][:, None]
            outs.append((state * q[t][:, None]).sum(-1) * scale)
        states.append(state)
        at += length
    return torch.stack(outs).to(value.dtype), torch.stack(states).to(value.dtype)
