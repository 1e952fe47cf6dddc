"""Tokens on their way to other processes, sorted and added up by Triton's programs, interpreted, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.processes import check, problems
from tests.support.triton_device import INTERPRETED
from twinkle.kernel.ops.moe.routing import route
from twinkle.moe import dispatch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on GPUs, tests/moe/test_sharded.py runs over NCCL")


def test_two_processes_share_the_experts(tmp_path: Path) -> None:
    found = problems(tmp_path, 2, "tests.support.expert_cases:INTERPRETED")
    assert len(found) == 10
    check(found)


def test_tritons_programs_are_used_and_find_the_same() -> None:
    programs = dispatch._by_triton()
    assert programs is not None
    index = torch.randint(-1, 5, (30, 3))
    ours, theirs = dispatch._sorted(index, 4), route(index, 4)
    there = int(theirs.ends[-1])
    assert torch.equal(ours.places, theirs.places) and torch.equal(ours.ends, theirs.ends)
    assert torch.equal(ours.tokens[:there], theirs.tokens[:there])
    rows = torch.randn(there, 8)[:, :6]  # as they are where the weights came with them
    expected = torch.zeros(30, 6).index_add(0, theirs.tokens[:there], rows)
    torch.testing.assert_close(dispatch._Gathered.apply(rows, theirs.tokens[:there], theirs.places), expected)
    assert dispatch._sorted(index[:0], 4).ends.tolist() == [0, 0, 0, 0]
