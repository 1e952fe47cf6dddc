"""Sending tokens to the processes that own their experts, and their results back.

Each process owns ``n`` of ``E`` experts in order: process r those from ``r * n`` on. What a process sends lies expert
by expert, so it is one piece for each receiver; what it receives lies sender by sender, and for each expert by expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives

from twinkle.kernel.ops.moe.routing import Route, route


class Dispatch(NamedTuple):
    """What the way back needs.

    Attributes:
        to: which of this process's rows went where.
        sent, received: rows to and from each process.
        arrived: ``[N, H]``, the rows as they came in.
        weights: ``[T, K]``, the router's.
    """

    to: Route
    sent: list[int]
    received: list[int]
    arrived: torch.Tensor
    weights: torch.Tensor


def dispatch(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int, group: dist.ProcessGroup
) -> tuple[Dispatch, torch.Tensor]:
    """Sends each token's row to the owners of its experts.

    Args:
        x: ``[T, H]``, this process's tokens.
        index: ``[T, K]`` integer, their experts among all ``experts``; outside of those there is nobody.
        weights: ``[T, K]``.

    Returns:
        what :func:`combine` needs, and the local expert ``[N]`` of each row that came in.
    """
    processes = dist.get_world_size(group)
    own = experts // processes
    to = route(index, experts)
    counts = torch.diff(to.ends, prepend=to.ends.new_zeros(1))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    # One copy to the host, and it must be waited for: sizes that are read early are garbage.
    sizes = torch.stack([counts.view(processes, own).sum(1), theirs.view(processes, own).sum(1)]).tolist()
    sent, received = sizes
    rows = _Rows.apply(x, to, sum(sent))
    arrived = _exchanged(rows, received, sent, group)
    local = torch.arange(own, device=x.device).repeat(processes).repeat_interleave(theirs, output_size=sum(received))
    return Dispatch(to, sent, received, arrived, weights), local


def combine(results: torch.Tensor, sent: Dispatch, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends the experts' results ``[N, H]`` back and adds them up: ``[T, H]`` for this process's tokens."""
    rows = _exchanged(results, sent.sent, sent.received, group)
    return _Sums.apply(rows, sent.weights, sent.to)  # type: ignore[no-any-return]


# A row goes to several places and comes back from them. Both ways, and in both gradients, it is gathered by indexing:
# adding rows up where they belong, which autograd would do, sorts them first and is many times slower; and the backward
# of index_select is wrong in some releases of torch_npu.


class _Rows(torch.autograd.Function):
    """``[S, H]``: each slot's token's row, sorted by expert; the first ``total`` slots have one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to: Route, total: int) -> torch.Tensor:
        ctx.save_for_backward(to.places)
        return x[to.slots[:total] // to.top_k]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _chosen(grad, places).sum(1), None, None


class _Sums(torch.autograd.Function):
    """``[T, H]``: each token's rows, by its weights."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, to: Route) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, to.places, to.slots)
        chosen = _chosen(rows, to.places)
        if weights.dtype == rows.dtype:  # one pass, adding up in fp32
            sums = rows.new_empty(len(chosen), rows.shape[1])
            torch.bmm(weights[:, None], chosen, out=sums[:, None])
            return sums  # and no view, which a model couldn't add to in place
        return (chosen * weights[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weights, places, slots = ctx.saved_tensors
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            slots = slots[: len(rows)]
            drows = (grad[slots // places.shape[1]] * weights.reshape(-1)[slots, None]).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            dweights = torch.bmm(_chosen(rows, places), grad[..., None]).squeeze(-1).to(weights.dtype)
        return drows, dweights, None


def _chosen(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``[T, K, H]``: what a token's choices gave; zeros for one that names no expert."""
    if len(rows) == places.numel():
        return rows[places.long()]
    # A row of zeros at the end is for choices without an expert.
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows[places.long().masked_fill(places < 0, len(rows) - 1)]


def _exchanged(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows in pieces from each process for pieces to each; the gradient goes the other way."""
    # The module is private by name; what is public has no gradient, or is deprecated in favour of this.
    exchanged = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, group)
    return exchanged.wait() if isinstance(exchanged, collectives.AsyncCollectiveTensor) else exchanged
