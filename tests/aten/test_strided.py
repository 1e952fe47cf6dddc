"""The strided copies: their plans, and their results for any two layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aten.conftest import DEVICE, INTERPRETED, TRITON
from tests.aten.layouts import DTYPES, filled, layouts
from twinkle.aten import strided
from twinkle.aten.harness.compare import memory_of
from twinkle.aten.layouts import is_dense, may_overlap
from twinkle.aten.reference import copy_by_address
from twinkle.aten.strided import make_plan, torch_copy, triton_copy

COPIES = [torch_copy, triton_copy] if TRITON else [torch_copy]


@pytest.mark.parametrize("copy", COPIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_two_layouts(copy, data: st.DataObject) -> None:
    layout = data.draw(layouts(overlapping=True, zeros=False))
    to_layout = data.draw(layouts(shape=layout[0]))
    dtype = data.draw(st.sampled_from(DTYPES))
    expected = filled(to_layout, dtype)
    copy_by_address(expected, filled(layout, dtype))
    to = filled(to_layout, dtype, DEVICE)
    copy(to, filled(layout, dtype, DEVICE))
    assert torch.equal(memory_of(to), memory_of(expected))


@pytest.mark.parametrize(
    ("sizes", "to", "source", "plan"),
    [
        ((), (), (), ((1,), (1,), (1,), 1, None, False)),
        ((3, 4), (4, 1), (4, 1), ((12,), (1,), (1,), 1, None, False)),
        ((3, 1, 4), (4, 99, 1), (4, 77, 1), ((12,), (1,), (1,), 1, None, False)),
        ((3, 4), (4, 1), (1, 3), ((4, 3), (1, 4), (3, 1), 1, 1, False)),
        ((32, 40), (40, 1), (1, 32), ((40, 32), (1, 40), (32, 1), 1, 1, True)),
        ((2, 32, 40), (1280, 40, 1), (1280, 1, 32), ((40, 32, 2), (1, 40, 1280), (32, 1, 1280), 1, 1, True)),
        ((32, 40, 3), (120, 3, 1), (3, 96, 1), ((40, 32), (3, 120), (96, 3), 3, 1, True)),
        (
            (9, 30, 2, 8),
            (480, 16, 8, 1),
            (480, 8, 240, 1),
            ((8, 2, 30, 9), (1, 8, 16, 480), (1, 240, 8, 480), 1, 2, False),
        ),
        ((6, 40), (40, 1), (0, 1), ((40, 6), (1, 40), (1, 0), 1, 1, False)),
        ((6, 40), (40, 1), (0, 0), ((240,), (1,), (0,), 1, None, False)),
    ],
)
def test_the_plan(sizes, to, source, plan) -> None:
    made = make_plan(sizes, to, source)
    assert made[:6] == plan and made.wide is False


@pytest.mark.parametrize(
    ("sizes", "to", "source", "wide"),
    [
        ((2**20, 2**11), (2**11, 1), (2**11, 1), True),
        ((2**20,), (1,), (1,), False),
        ((2, 8), (8, 1), (2**31, 1), True),
    ],
)
def test_offsets_beyond_32_bits(sizes, to, source, wide: bool) -> None:
    assert make_plan(sizes, to, source).wide is wide


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="an interpreted kernel in the host's memory")
def test_wide_offsets_are_computed_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same copies with 64-bit offsets, and with fewer programs than blocks, so that each loops."""
    from twinkle.aten import launch

    strided._copying.cache_clear()  # or launches from before would be taken
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2)
    narrow = strided.make_plan
    monkeypatch.setattr(strided, "make_plan", lambda *layout: narrow(*layout)._replace(wide=True))
    for source in (
        torch.randn(50_000),
        torch.randn(90, 500)[:, :400],
        torch.randn(700, 300).t(),
        torch.randn(3, 150, 140).permute(0, 2, 1),
        torch.randn(3, 151, 141).bfloat16().permute(0, 2, 1),
        torch.randn(150, 140, 2).transpose(0, 1),
        torch.randn(70, 90, dtype=torch.complex128).t(),
    ):
        to = torch.empty(source.shape, dtype=source.dtype)
        triton_copy(to, source)
        assert torch.equal(to, source)
    strided._copying.cache_clear()


@pytest.mark.skipif(not TRITON, reason="it takes Triton")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("few", [2, 3, 4])
@pytest.mark.parametrize("gap", [0, 1, 12])
@pytest.mark.parametrize("side", [5, 33])
def test_few_elements_that_lie_side_by_side(dtype: torch.dtype, few: int, gap: int, side: int) -> None:
    """Transposed where there are enough; all strides are multiples of them, of some, or of none."""
    width = few + gap
    source = torch.arange(side * 40 * width, device=DEVICE).to(dtype).view(side, 40, width)[..., :few].transpose(0, 1)
    memory = torch.full((40, side, width), 99, dtype=dtype, device=DEVICE)
    expected = memory.clone()
    expected[..., :few] = source
    triton_copy(memory[..., :few], source)
    assert torch.equal(memory, expected)


@pytest.mark.skipif(not TRITON, reason="it takes Triton")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_narrow_elements_that_are_transposed_from_anywhere_to_anywhere(data: st.DataObject) -> None:
    """Rows and columns begin where no word does, and lie apart: words are whole, what lies between stays."""
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.bfloat16]))
    side, step = st.integers(16, 150), st.integers(0, 5)
    batches, rows, columns = data.draw(st.integers(1, 3)), data.draw(side), data.draw(side)
    source = a_piece_of_memory((batches, columns, rows), data.draw(step), data.draw(step), dtype).transpose(1, 2)
    begin, gap = data.draw(step), data.draw(step)
    to = a_piece_of_memory((batches, rows, columns), begin, gap, dtype)
    expected = a_piece_of_memory((batches, rows, columns), begin, gap, dtype)
    expected.copy_(source)
    triton_copy(to, source)
    assert torch.equal(memory_of(to), memory_of(expected))


def a_piece_of_memory(shape: tuple[int, int, int], begin: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in rows with such gaps, which lie between the batches, too; the first begins so many elements on."""
    batches, rows, columns = shape
    width, batch = columns + gap, rows * (columns + gap) + gap
    whole = torch.arange(begin + batches * batch + 8, device=DEVICE).remainder_(119).to(dtype)
    return whole.as_strided(shape, (batch, width, 1), begin)


NARROW, ODD = torch.bfloat16, (48, 41)
PACKS: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {
    "bytes": (torch.empty(ODD, dtype=torch.uint8), torch.empty(ODD[::-1], dtype=torch.uint8).t(), 4),
    "halves": (torch.empty(ODD, dtype=NARROW), torch.empty(ODD[::-1], dtype=NARROW).t(), 4),
    "aligned": (torch.empty(48, 64, dtype=NARROW), torch.empty(64, 48, dtype=NARROW).t(), 1),
    "wide": (torch.empty(ODD), torch.empty(ODD[::-1]).t(), 1),
    "a cast": (torch.empty(ODD, dtype=torch.float16), torch.empty(ODD[::-1], dtype=NARROW).t(), 1),
    "not transposed": (torch.empty(ODD, dtype=NARROW), torch.empty(48, 47, dtype=NARROW)[:, :41], 1),
    "apart": (torch.empty(48, 82, dtype=NARROW)[:, ::2], torch.empty(ODD[::-1], dtype=NARROW).t(), 1),
    "few": (torch.empty(48, 41, 2, dtype=NARROW), torch.empty(41, 48, 2, dtype=NARROW).transpose(0, 1), 1),
}


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.skipif(not TRITON, reason="it takes Triton")
def test_which_copies_write_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to, source, pack = PACKS[name]
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(strided, "program", lambda *_, **constants: made.append(constants) or (lambda *tensors: None))
    for device, expected in ((torch.device("cpu"), pack), (torch.device("meta"), 1)):
        strided._copying.__wrapped__(to.dtype, source.dtype, device, to.shape, to.stride(), source.stride())
        assert made[-1]["PACK"] == expected


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.skipif(not TRITON, reason="it takes Triton")
def test_words_or_not_the_copy_is_right(name: str) -> None:
    to, source, _ = (each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in PACKS[name])
    source.copy_(torch.arange(source.numel(), device=DEVICE).remainder_(119).view(source.shape))
    triton_copy(to.zero_(), source)
    assert torch.equal(to, source.to(to.dtype))


def brute_force_overlap(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    addresses = [0]
    for size, stride in zip(sizes, strides, strict=True):
        addresses = [address + i * stride for address in addresses for i in range(size)]
    return len(set(addresses)) < len(addresses)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4))
def test_overlap_and_density(dimensions: list[tuple[int, int]]) -> None:
    sizes, strides = tuple(d[0] for d in dimensions), tuple(d[1] for d in dimensions)
    overlaps = brute_force_overlap(sizes, strides)
    assert may_overlap(sizes, strides) or not overlaps, "an overlap was missed"
    reach = 1 + sum((n - 1) * s for n, s in dimensions)
    assert is_dense(sizes, strides) <= (not overlaps and reach == math.prod(sizes))
    ordinary = torch.empty(sizes).permute(tuple(range(len(sizes)))[::-1])
    assert is_dense(ordinary.shape, ordinary.stride()) and not may_overlap(ordinary.shape, ordinary.stride())
