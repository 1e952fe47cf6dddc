"""The route of :mod:`twinkle.kernel.ops.moe.routing` in three launches: a counting sort that keeps the tokens' order.

PyTorch's operators take a dozen launches for it, which a small block of experts waits for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinkle.kernel.ops.moe.routing import Route
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Program

CELLS = 16384
"""Slots of a program times experts."""


@triton.jit
def _chosen(index_ptr, at, slots, experts, EXPERTS: tl.constexpr):
    """Which slot chose which expert, ``[BLOCK, EXPERTS]``, and whether a slot chose one that there is."""
    chosen = tl.load(index_ptr + at, mask=at < slots, other=-1)
    known = (chosen >= 0) & (chosen < experts)
    return (chosen[:, None] == tl.arange(0, EXPERTS)[None, :]) & known[:, None], known


@triton.jit
def count_kernel(index_ptr, counts_ptr, slots, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots of each block chose each expert: ``counts [blocks, E]``."""
    block = tl.program_id(0).to(tl.int64)  # times experts it may pass 2^31
    chose, _ = _chosen(index_ptr, block * BLOCK + tl.arange(0, BLOCK), slots, experts, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + block * experts + expert, tl.sum(chose.to(tl.int32), axis=0), mask=expert < experts)


@triton.jit
def scan_kernel(counts_ptr, totals_ptr, blocks, experts, BLOCKS: tl.constexpr):
    """Turns each expert's counts into how many came in the blocks before; ``totals [E]`` in all."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, blocks, BLOCKS):
        at = (start + tl.arange(0, BLOCKS)).to(tl.int64)
        counts = tl.load(counts_ptr + at * experts + expert, mask=at < blocks, other=0)
        before = total + tl.cumsum(counts, axis=0) - counts
        tl.store(counts_ptr + at * experts + expert, before, mask=at < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def place_kernel(
    index_ptr, counts_ptr, totals_ptr, ends_ptr, slots_ptr, tokens_ptr, places_ptr, slots, experts, top_k,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the route from the scanned counts."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    chose, known = _chosen(index_ptr, at, slots, experts, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    totals = tl.load(totals_ptr + expert, mask=exists, other=0)
    ends = tl.cumsum(totals, axis=0)
    tl.store(ends_ptr + expert, ends, mask=exists & (block == 0))
    first = ends - totals + tl.load(counts_ptr + block * experts + expert, mask=exists, other=0)
    rank = tl.cumsum(chose.to(tl.int32), axis=0) - 1
    place = tl.sum(tl.where(chose, first[None, :] + rank, 0), axis=1)
    tl.store(places_ptr + at, tl.where(known, place, -1), mask=at < slots)
    tl.store(slots_ptr + place, at.to(tl.int64), mask=known)
    tl.store(tokens_ptr + place, (at // top_k).to(tl.int64), mask=known)
    behind = (at >= tl.sum(totals, axis=0)) & (at < slots)  # where nobody's slot goes
    tl.store(slots_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=behind)
    tl.store(tokens_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=behind)


_programs: Memory[tuple[Program, Program, Program]] = Memory()


def route(index: torch.Tensor, experts: int) -> Route:
    """As :func:`twinkle.kernel.ops.moe.routing.route`; behind all experts' slots lie zeros."""
    index = index.contiguous()
    key = index.shape, index.dtype, index.device, experts
    programs = _programs.get(key) or _programs.add(key, _launched(index.shape[0], index.shape[1], experts))
    count, scan, place = programs
    blocks = count.launch.grid[0]
    counts = torch.empty((blocks + 2, experts), dtype=torch.int32, device=index.device)
    totals, ends = counts[blocks], counts[blocks + 1]
    slots, tokens = torch.empty((2, index.numel()), dtype=torch.int64, device=index.device)
    places = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    count(index, counts)
    scan(counts, totals)
    place(index, counts, totals, ends, slots, tokens, places)
    return Route(slots, tokens, places, ends)


def _launched(tokens: int, top_k: int, experts: int) -> tuple[Program, Program, Program]:
    slots = tokens * top_k
    width = triton.next_power_of_2(experts)
    block = max(16, CELLS // width)
    blocks = triton.cdiv(slots, block)
    constants = {"EXPERTS": width, "BLOCK": block}
    return (
        Program(count_kernel, Launch((blocks,), (slots, experts), constants, 8)),
        Program(scan_kernel, Launch((experts,), (blocks, experts), {"BLOCKS": 512}, 4)),
        Program(place_kernel, Launch((blocks,), (slots, experts, top_k), constants, 8)),
    )
