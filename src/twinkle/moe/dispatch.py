"""Sending tokens to the processes that own their experts, and their results back.

Each process owns ``n`` of ``E`` experts in order: process r those from ``r * n`` on. What a process sends lies expert
by expert, so it is one piece for each receiver; what it receives lies sender by sender, and for each expert by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
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
    total = sum(sent)
    # By indexing: the backward of index_select is wrong in some releases of torch_npu.
    rows = x[to.slots[:total] // to.top_k]
    arrived = _exchanged(rows, received, sent, group)
    local = torch.arange(own, device=x.device).repeat(processes).repeat_interleave(theirs, output_size=sum(received))
    return Dispatch(to, sent, received, arrived, weights), local


def combine(results: torch.Tensor, sent: Dispatch, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends the experts' results ``[N, H]`` back and adds them up: ``[T, H]`` for this process's tokens."""
    rows = _exchanged(results, sent.sent, sent.received, group)
    nobody = sent.to.places < 0
    # A row of zeros at the end is what a slot without an expert gets.
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    chosen = rows[sent.to.places.long().masked_fill(nobody, len(rows) - 1)]
    return (chosen * sent.weights[..., None]).sum(1).to(results.dtype)


def _exchanged(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows in pieces from each process for pieces to each; the gradient goes the other way."""
    # The module is private by name; what is public has no gradient, or is deprecated in favour of this.
    exchanged = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, group)
    return exchanged.wait() if isinstance(exchanged, collectives.AsyncCollectiveTensor) else exchanged
