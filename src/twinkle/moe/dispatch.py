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
from torch import nn

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
    processes = dist.get_world_size(group)
    own = experts // processes
    owners, everybody = torch.div(index, own, rounding_mode="floor"), torch.arange(processes, device=x.device)
    owned = (owners[:, None] == everybody[:, None]).sum(-1)  # [T, P], how many of a token's choices
    goes = owned > 0
    outgoing = _sorted(everybody.where(goes, processes), processes)
    counts = torch.stack((goes, owned), -1).sum(0)
    # The way back of the gradients is a collective too: where some processes need it, all have to come there.
    needed = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    counts = nn.functional.pad(counts, (0, 1), value=needed)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    numbers = torch.stack((counts, theirs))
    # The router's choices and weights go along, in numbers that hold both.
    exact = torch.promote_types(weights.dtype, torch.float32)
    table = torch.cat((weights.to(exact), index.to(exact)), 1)
    packed = _packed(x.detach(), table.detach())
    # All that doesn't need the sizes is under way. They must be waited for: those that are read early are garbage.
    to_each, from_each = numbers.tolist()
    sent, received = ([rows for rows, _, _ in sizes] for sizes in (to_each, from_each))
    slots = sum(choices for _, choices, _ in from_each)
    if torch.is_grad_enabled() and not needed and any(other for _, _, other in from_each):
        x = x.detach().requires_grad_()
    away = Copies(outgoing.tokens[: sum(sent)], outgoing.places)
    arrived, arrived_table = _Sent.apply(sent, received, group, *away, packed, x, table)
    given, chosen = arrived_table.chunk(2, 1)
    local = chosen.long() - dist.get_rank(group) * own
    incoming = _sorted(local, own)
    inside, taken = Copies(incoming.tokens[:slots], incoming.places), incoming.slots[:slots]
    # No choice is taken twice, so the backward of gather has nothing to add up.
    given = given.flatten().gather(0, taken)[:, None].to(weights.dtype)
    found = Dispatch(away, inside, sent, received, _Spread.apply(arrived, *inside), given)
    return found, local.flatten().gather(0, taken)


def combine(results: torch.Tensor, sent: Dispatch, group: dist.ProcessGroup) -> torch.Tensor:
    """Adds up the experts' results ``[S, H]`` and sends them back: ``[T, H]`` for this process's tokens."""
    rows = _Gathered.apply(results, *sent.inside)
    (found,) = _Returned.apply(sent.sent, sent.received, group, *sent.away, rows)
    return found  # type: ignore[no-any-return]


def _sorted(index: torch.Tensor, owners: int) -> Route:
    """Which of ``owners`` each choice ``[N, K]`` is for, in as few launches as there may be."""
    programs = _by_triton()
    by = programs.route if programs and launchable(index.device) and index.numel() else route
    return by(index, owners)


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
        return _gathered(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None


def _gathered(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    programs = _by_triton()
    if programs and len(rows) and launchable(rows.device) and rows.dtype in DTYPES:
        rows = rows.resolve_neg()  # the program reads the memory
        return programs.combine(rows if rows.stride(1) == 1 else rows.contiguous(), places, None, rows.dtype)
    # A row of zeros at the end is for places that there aren't. Choice by choice, since all of them at once would take
    # as much memory again as what all experts work on.
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    places = places.long().masked_fill(places < 0, len(rows) - 1)
    total = torch.zeros(
        len(places), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device
    )
    for column in places.unbind(1):
        total += rows[column]
    return total.to(rows.dtype)


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


# The same with the other processes in between. What belongs to a row travels in one exchange with it, since each
# exchange waits for the slowest process.


class _Sent(torch.autograd.Function):
    """Of tensors ``[T, *]``, which ``packed`` has side by side: other processes' copies of rows ``[N, *]``."""

    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup,
        sources: torch.Tensor, places: torch.Tensor, packed: torch.Tensor, *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.there = sent, received, group
        ctx.save_for_backward(sources, places)
        return _unpacked(_exchanged(packed[sources], sent, received, group), tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return *(None,) * 6, *_Returned.apply(*ctx.there, *ctx.saved_tensors, *grads)


class _Returned(torch.autograd.Function):
    """Of tensors ``[N, *]``: the sums ``[T, *]`` of what came back for each row."""

    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup,
        sources: torch.Tensor, places: torch.Tensor, *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.there = sent, received, group
        ctx.save_for_backward(sources, places)
        found = _exchanged(_packed(*tensors), received, sent, group)
        return tuple(_gathered(one, places) for one in _unpacked(found, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        packed = _packed(*(grad.detach() for grad in grads))
        return *(None,) * 5, *_Sent.apply(*ctx.there, *ctx.saved_tensors, packed, *grads)


def _packed(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The rows of each side by side, seen as numbers of the first one's dtype."""
    if not others:
        return first.contiguous()
    return torch.cat([first, *(one.contiguous().view(first.dtype) for one in others)], 1)


def _unpacked(packed: torch.Tensor, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors again, by their dtypes and widths. The first, which is the large one, is no copy."""
    size = packed.element_size()
    first, *others = packed.split([one.shape[1] * one.element_size() // size for one in like], 1)
    copies = (other.clone(memory_format=torch.contiguous_format) for other in others)
    return first, *(copy.view(one.dtype) for copy, one in zip(copies, like[1:], strict=True))


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows, received, sent, group=group)
    return found
