"""Sending tokens to the processes that own their experts, and their results back.

Each process owns ``n`` of ``E`` experts in order: process r those from ``r * n`` on. A token's row travels once to each
process that owns some of its experts, and one row comes back from there: the sum of what those experts gave, by the
router's weights, rounded to the rows' dtype. In between, the rows that came in are laid out expert by expert, once for
each choice, so that the experts themselves see tokens of one choice each, and no choice that isn't theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from twinkle.kernel.ops.moe.routing import Route, route
from twinkle.kernel.ops.triton_support import DTYPES, available, launchable


class Copies(NamedTuple):
    """Rows of which each is needed in some places.

    Attributes:
        sources: ``[M]``, which row each place has.
        places: ``[N, P]`` contiguous, the places of each row; -1 for none.
    """

    sources: torch.Tensor
    places: torch.Tensor


class Dispatch(NamedTuple):
    """What the way back needs.

    Attributes:
        away: which of this process's tokens went where.
        inside: which of the rows that came in each of this process's choices works on.
        sent, received: rows to and from each process.
        rows: ``[S, H]``, what the experts of this process work on.
        weights: ``[S, 1]``, the router's.
    """

    away: Copies
    inside: Copies
    sent: list[int]
    received: list[int]
    rows: torch.Tensor
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
        what :func:`combine` needs, and the local expert ``[S]`` of each of its rows.
    """
    processes, choices = dist.get_world_size(group), index.shape[1]
    own = experts // processes
    owners, everybody = torch.div(index, own, rounding_mode="floor"), torch.arange(processes, device=x.device)
    is_owner = owners[:, None] == everybody[:, None]  # [T, P, K]
    outgoing = _sorted(everybody.where(is_owner.any(-1), processes), processes)
    counts = torch.stack((_counts(outgoing), is_owner.sum((0, 2))), 1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    numbers = torch.cat((counts[:, 0], theirs[:, 0], theirs[:, 1]))
    # The router's choices and weights go along, in numbers that hold both.
    exact = torch.promote_types(weights.dtype, torch.float32)
    table = torch.cat((weights.to(exact), index.to(exact)), 1)
    # All that doesn't need the sizes is under way. They must be waited for: those that are read early are garbage.
    sizes: list[int] = numbers.tolist()
    sent, received, slots = sizes[:processes], sizes[processes:-processes], sum(sizes[-processes:])
    away = Copies(outgoing.tokens[: sum(sent)], outgoing.places)
    leaving = _Spread.apply(x, *away), _Spread.apply(table, *away)
    arrived, arrived_table = _Exchange.apply(sent, received, group, *leaving)
    local = arrived_table.detach()[:, choices:].to(index.dtype) - dist.get_rank(group) * own
    incoming = _sorted(local, own)
    inside = Copies(incoming.tokens[:slots], incoming.places)
    of_slots = Copies(incoming.slots[:slots], incoming.places.reshape(-1, 1))
    given = _Spread.apply(arrived_table[:, :choices].reshape(-1, 1), *of_slots).to(weights.dtype)
    found = Dispatch(away, inside, sent, received, _Spread.apply(arrived, *inside), given)
    experts_here = torch.arange(own, device=x.device)
    return found, experts_here.repeat_interleave(_counts(incoming), output_size=slots)


def combine(results: torch.Tensor, sent: Dispatch, group: dist.ProcessGroup) -> torch.Tensor:
    """Adds up the experts' results ``[S, H]`` and sends them back: ``[T, H]`` for this process's tokens."""
    (rows,) = _Exchange.apply(sent.received, sent.sent, group, _Gathered.apply(results, *sent.inside))
    return _Gathered.apply(rows, *sent.away)  # type: ignore[no-any-return]


def _sorted(index: torch.Tensor, owners: int) -> Route:
    """Which of ``owners`` each choice ``[N, K]`` is for, in as few launches as there may be."""
    programs = _by_triton()
    by = programs.route if programs and launchable(index.device) and index.numel() else route
    return by(index, owners)


def _counts(route: Route) -> torch.Tensor:
    """How many rows each owner has."""
    return torch.diff(route.ends, prepend=route.ends.new_zeros(1))


# A row goes to several places, and what is made of it there is added up again: the one is the other's gradient. Both
# gather by indexing: adding rows up where they belong, which autograd would do, sorts them first and is many times
# slower; and the backward of index_select is wrong in some releases of torch_npu.


class _Spread(torch.autograd.Function):
    """``[M, H]``: a copy of a row of ``[N, H]`` in each place."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources, places)
        return rows[sources]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Gathered.apply(grad, *ctx.saved_tensors), None, None


class _Gathered(torch.autograd.Function):
    """``[N, H]``: the sum of what ``[M, H]`` has in the places of each row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources, places)
        programs = _by_triton()
        if programs and len(rows) and launchable(rows.device) and rows.dtype in DTYPES:
            return programs.combine(rows.contiguous(), places, None, rows.dtype)
        # A row of zeros at the end is for places that there aren't. Choice by choice, since all of them at once would
        # take as much memory again as what all experts work on.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        places = places.long().masked_fill(places < 0, len(rows) - 1)
        total = torch.zeros(
            len(places), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device
        )
        for column in places.unbind(1):
            total += rows[column]
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None


class _Programs(NamedTuple):
    route: Callable[..., Route]
    combine: Callable[..., torch.Tensor]


@functools.cache
def _by_triton() -> _Programs | None:
    """Who sorts and adds up in fewer passes, where Triton runs."""
    if not available()[0]:
        return None
    from twinkle.kernel.ops.moe import triton_launch, triton_routing

    return _Programs(triton_routing.route, triton_launch.combine)


class _Exchange(torch.autograd.Function):
    """Rows in pieces for each process, in the place of pieces from each; the gradients go the other way.

    All tensors in one function, so that every process sends their gradients in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.there = sent, received, group
        return tuple(_exchanged(tensor, sent, received, group) for tensor in tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.there
        return None, None, None, *(_exchanged(grad, received, sent, group) for grad in grads)


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
