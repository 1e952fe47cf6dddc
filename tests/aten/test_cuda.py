"""What only a GPU shows: more than 2³¹ elements, graphs, streams, a device that isn't the current one.

``TWINKLE_TEST_DEVICE=cuda pytest tests/aten`` on a machine with one; elsewhere nothing here can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.aten.conftest import DEVICE
from twinkle.aten import install

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="it takes a GPU")

MANY = 2**31 + 2**21
"""Elements, more than 32 bits can count."""


@contextmanager
def served(*operators: str) -> Iterator[None]:
    """Within it our kernels serve every call that they can take, and each operator must have served one."""
    with install(list(operators), platform="nvidia") as installed:
        yield
        counts = {name: each.counts.kernel for name, each in installed.registrations.items()}
    assert all(counts.values()), counts


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.view(2**10, -1).t().clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.view(2**10, -1).t().contiguous(),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
}


@pytest.mark.parametrize("name", COPIES)
def test_more_elements_than_32_bits_count(name: str) -> None:
    x = torch.arange(MANY, dtype=torch.int64, device=DEVICE).bitwise_and_(127).to(torch.int8)
    with served(name):
        result = COPIES[name](x)
    expected = x if name == "copy_" else x.view(2**10, -1).t()
    assert torch.equal(result.view(expected.shape), expected)


def test_as_many_elements_as_32_bits_count() -> None:
    """A tile more would be beyond them."""
    x = torch.arange(2**31 - 1, dtype=torch.int32, device=DEVICE).bitwise_and_(127).to(torch.int8)
    with served("clone"):
        assert torch.equal(x.clone(), x)


def test_dropout_of_more_elements_than_32_bits_count() -> None:
    x = torch.ones(MANY, dtype=torch.float16, device=DEVICE)
    with served("dropout"):
        y = torch.nn.functional.dropout(x, 0.5)
    for part in (y[: 2**20], y[-(2**20) :]):
        assert set(part.unique().tolist()) == {0.0, 2.0}
        assert abs((part == 0).float().mean().item() - 0.5) < 0.01
    assert not torch.equal(y[: 2**20], y[2**31 : 2**31 + 2**20]), "a counter of 32 bits would begin again"


def test_embedding_into_a_table_of_more_elements_than_32_bits_count() -> None:
    width = 2**12
    weight = torch.zeros(MANY // width, width, dtype=torch.float16, device=DEVICE)
    weight[-1] = 3
    with served("embedding"):
        result = torch.nn.functional.embedding(torch.tensor([len(weight) - 1, 0], device=DEVICE), weight)
    assert result[0].eq(3).all() and result[1].eq(0).all()


def test_a_captured_graph_is_replayed_on_new_values() -> None:
    x = torch.randn(256, 512, device=DEVICE)
    with served("contiguous", "dropout"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # what compiles can't be captured
            torch.nn.functional.dropout(x.t().contiguous(), 0.5)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turned = x.t().contiguous()
            dropped = torch.nn.functional.dropout(turned, 0.5)
    masks = []
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(turned, x.t())
        kept = dropped != 0
        assert torch.equal(dropped[kept], turned[kept] * 2)
        masks.append(kept)
    assert not torch.equal(*masks), "every replay draws anew"


def test_a_copy_on_a_side_stream_comes_after_what_was_there_before() -> None:
    x = torch.zeros(4096, 4096, device=DEVICE)
    with served("contiguous"):
        x.t().contiguous()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # some 30 ms, in which nobody may read x
            x.fill_(1)
            copied = x.t().contiguous()
        torch.cuda.current_stream().wait_stream(side)
        assert copied.eq(1).all()


@pytest.mark.skipif(DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_a_tensor_of_another_device_than_the_current() -> None:
    x = torch.randn(128, 256, device="cuda:1")
    with served("contiguous", "dropout", "embedding"):
        assert torch.cuda.current_device() == 0
        for _ in range(2):  # the first call goes Triton's own way
            assert torch.equal(x.t().contiguous().cpu(), x.cpu().t())
            assert torch.nn.functional.dropout(x, 0.5).device == x.device
            rows = torch.tensor([3, 5], device=x.device)
            assert torch.equal(torch.nn.functional.embedding(rows, x).cpu(), x[3:6:2].cpu())
