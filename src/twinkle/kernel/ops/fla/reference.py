"""The gated delta rule (Yang, Kautz & Hatamizadeh, 2024, arXiv:2412.06464) in two forms, and the convolution before it.

A state ``S [K, V]`` per head decays, forgets what it would answer to the key, and learns the value instead:
``S_t = a_t S + k_t (b_t (v_t - a_t S^T k_t))^T`` with ``a_t = exp(g_t)``; the output is ``S_t^T q_t K^-1/2``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_SIZE = 64

Result = tuple[torch.Tensor, torch.Tensor | None]


def pieces(length: int, bounds: torch.Tensor | None) -> list[tuple[int, int]]:
    """Begin and end of each document; of all where nothing is packed. ``bounds [documents + 1]`` begins with 0."""
    if bounds is None:
        return [(0, length)]
    ends = bounds.tolist()
    return list(zip(ends, ends[1:], strict=False))


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of length 1, but for what keeps zeros from becoming infinite."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    normalised: bool = False,
    bounds: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Result:
    """Token by token, as the formula says.

    Args:
        query, key: ``[B, T, H, K]``.
        value: ``[B, T, H, V]``.
        g, beta: ``[B, T, H]``.
        initial_state: ``[B, H, K, V]``; with documents one for each.
        output_final_state: return the last state, or that of each document.
        normalised: make query and key unit vectors first.
        bounds: where packed documents begin and end, for B = 1.
        compute_dtype: what is computed in.
    """
    tensors = (query, key, value, g, beta)
    return _by_document(_recurrent, tensors, initial_state, output_final_state, normalised, bounds, compute_dtype)


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    normalised: bool = False,
    bounds: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Result:
    """The same in chunks of tokens, whose mutual effects are a triangular system; arguments as :func:`recurrent`."""
    tensors = (query, key, value, g, beta)
    return _by_document(_chunked, tensors, initial_state, output_final_state, normalised, bounds, compute_dtype)


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each channel of ``[B, D, T]`` with its own ``weight [D, W]``, over what came before in its document."""
    parts = []
    for begin, end in pieces(x.shape[-1], bounds):
        if begin == end:
            continue
        padded = F.pad(x[..., begin:end].to(weight.dtype), (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))
    out = torch.cat(parts, -1)
    return (out if activation is None else F.silu(out)).to(x.dtype)


def _by_document(step, tensors, state, wanted, normalised, bounds, dtype) -> Result:  # type: ignore[no-untyped-def]
    outs, states = [], []
    for number, (begin, end) in enumerate(pieces(tensors[0].shape[1], bounds)):
        q, k, v, decay, rate = (tensor[:, begin:end].transpose(1, 2).to(dtype) for tensor in tensors)
        if normalised:
            q, k = unit(q), unit(k)
        if state is None:
            start = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
        else:
            start = (state if bounds is None else state[number : number + 1]).to(dtype)
        if begin == end:
            states.append(start)
            continue
        out, last = step(q * q.shape[-1] ** -0.5, k, v, decay, rate, start)
        outs.append(out.transpose(1, 2))
        states.append(last)
    return torch.cat(outs, 1).to(tensors[0].dtype).contiguous(), torch.cat(states) if wanted else None


def _recurrent(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        answer = (k[:, :, t, None] @ state).squeeze(2)
        learned = beta[:, :, t, None] * (v[:, :, t] - answer)
        state = state + k[:, :, t, :, None] * learned[:, :, None]
        outs.append((q[:, :, t, None] @ state).squeeze(2))
    return torch.stack(outs, 2), state


def _chunked(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    """With ``c`` the sum of ``g`` in a chunk up to a token, token i changes j > i by ``b_j k_j k_i exp(c_j - c_i)``."""
    outs = []
    chunks = zip(*(tensor.split(CHUNK_SIZE, 2) for tensor in (q, k, v, g, beta)), strict=True)
    for queries, keys, values, decays, rates in chunks:
        total = decays.cumsum(-1)
        decay = total[..., :, None] - total[..., None, :]
        # Before the exponential: of what is later it would overflow.
        decay = decay.masked_fill(torch.ones_like(decay, dtype=torch.bool).triu(1), float("-inf")).exp()
        since, left, rate = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None], rates[..., None]
        system = (keys * rate) @ keys.transpose(-1, -2) * decay
        right = torch.cat((values * rate, keys * rate * since), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        learned, forgotten = solved.split((values.shape[-1], keys.shape[-1]), -1)
        learned = learned - forgotten @ state
        outs.append((queries * since) @ state + (queries @ keys.transpose(-1, -2) * decay) @ learned)
        state = state * since[..., -1:, :] + (keys * left).transpose(-1, -2) @ learned
    return torch.cat(outs, 2), state
