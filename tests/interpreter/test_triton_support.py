"""What all Triton kernels share: addressing, remembered launches, workspaces, tuned configurations, availability."""

from __future__ import annotations

import dataclasses
import itertools
import json
from importlib import resources

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.triton_device import DEVICE, examples
from twinkle.kernel.ops import triton_support
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.triton_support import far, rows_of, tuned
from twinkle.kernel.targets import Site

# --- rows -------------------------------------------------------------------------------------------------------------


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The offset of every row's first element, in order."""
    ranges = [range(size) for size in shape[:-1]]
    return [sum(i * s for i, s in zip(at, strides, strict=False)) for at in itertools.product(*ranges)]


def addresses_by_kernel(rows: triton_support.Rows) -> list[int]:
    """The same as the programs compute them."""
    found = []
    for row in range(rows.total):
        outer = row // rows.inner
        middle = (outer // rows.middle) * rows.outer_stride + (outer % rows.middle) * rows.middle_stride
        found.append(middle + (row % rows.inner) * rows.stride)
    return found


sizes = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 4, 8, 12, 24, 2**31, 2**33])), max_size=5)


@examples
@given(dimensions=sizes, width=st.integers(1, 5), column_stride=st.sampled_from([1, 2, 7]))
def test_rows_are_where_the_strides_say(dimensions: list[tuple[int, int]], width: int, column_stride: int) -> None:
    shape = (*(size for size, _ in dimensions), width)
    strides = (*(stride for _, stride in dimensions), column_stride)
    rows = rows_of(shape, strides)
    if rows is None:
        assert sum(size > 1 for size in shape[:-1]) > 3
        return
    assert addresses_by_kernel(rows) == addresses(shape, strides)
    assert rows.column_stride == (column_stride if width > 1 else 1)


@pytest.mark.parametrize(
    ("shape", "permutation", "middle", "inner"),
    [
        ((2, 3, 4, 8), (0, 1, 2, 3), 1, 1),  # all in one line
        ((2, 3, 4, 8), (2, 0, 1, 3), 6, 1),  # two of three
        ((2, 3, 4, 8), (0, 2, 1, 3), 4, 3),  # none
        ((1, 5, 1, 8), (2, 1, 0, 3), 1, 1),
    ],
)
def test_neighbours_that_lie_in_one_line_are_one_dimension(
    shape: tuple[int, ...], permutation: tuple[int, ...], middle: int, inner: int
) -> None:
    """What is left over has size 1, which Triton compiles in: no division is left in the program."""
    t = torch.empty(shape).permute(permutation)
    rows = rows_of(t.shape, t.stride())
    assert rows is not None
    assert (rows.middle, rows.inner) == (middle, inner)


def test_more_than_three_dimensions_are_followed_only_where_they_merge() -> None:
    t = torch.empty(2, 3, 4, 5, 6, 8)
    assert rows_of(t.shape, t.stride()) is not None
    gaps = t[:, ::2, ::2, ::2]
    assert rows_of(gaps.shape, gaps.stride()) is None


def test_far_is_what_32_bits_do_not_reach() -> None:
    assert not far((2**16, 2**15)) and not far((2**31 // 3, 3)) and not far((2**40, 1), (5, 0))
    assert far((3, 2**30)) and far((5, 1), (2**16 + 1, 2**15))


def test_every_row_is_found_beyond_32_bits() -> None:
    """Of a tensor that only the meta device has room for."""
    t = torch.empty(2**20 + 1, 4, 2**12, dtype=torch.bfloat16, device="meta").transpose(0, 1)
    rows = rows_of(t.shape, t.stride())
    assert rows is not None and rows.total == 4 * (2**20 + 1)
    last = rows.total - 1
    assert t.numel() > 2**33
    outer = last // rows.inner
    offset = (outer // rows.middle) * rows.outer_stride + (outer % rows.middle) * rows.middle_stride
    assert offset + (last % rows.inner) * rows.stride + t.shape[-1] == t.numel()


# --- tuned configurations ---------------------------------------------------------------------------------------------

TABLE = json.loads(resources.files("twinkle.kernel.ops").joinpath("triton_tuning.json").read_text())
BLOCKS = {
    # Every power of two up to the widest row; of wider rows, the block that is read at a time.
    ("rms_norm", "forward"): [2**n for n in range(16)],
    ("rms_norm", "backward"): [2**n for n in range(15)],
    **{(op, direction): [1] for op in ("glu", "rotary") for direction in ("forward", "backward")},
}
ENTRIES = {"rms_norm": 4, "glu": 2, "rotary": 2}


def test_the_blocks_are_those_that_the_code_asks_for() -> None:
    for direction in ("forward", "backward"):
        widest = BLOCKS["rms_norm", direction][-1]
        assert widest == triton_launch.WIDEST[direction] >= triton_launch.WIDE_BLOCK
        for width in (1, 2, 3, 100, widest - 1, widest, widest + 1, 10 * widest):
            shape = triton_launch.tiling_of(torch.device("cpu"), direction, width, 1000)
            assert shape.block in BLOCKS["rms_norm", direction]
            assert shape.block >= width or width > widest


@pytest.mark.parametrize("architecture", TABLE)
def test_every_architecture_has_an_entry_for_every_block(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TABLE.keys() >= {"default"}
    tuned.cache_clear()
    # A table of one architecture only: nothing can come from another one.
    monkeypatch.setattr(triton_support, "_table", lambda: {"default": TABLE[architecture]})
    for (op, direction), blocks in BLOCKS.items():
        for block in blocks:
            found = tuned(op, direction, torch.device("cpu"), block)
            assert len(found) == ENTRIES[op]
            assert all(number >= 1 for number in found)
            assert found[1] in (1, 2, 4, 8, 16, 32)  # warps
            assert found[0] & (found[0] - 1) == 0  # sizes are powers of two
    tuned.cache_clear()


def test_an_unknown_architecture_uses_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> tuple[int, ...]:
        tuned.cache_clear()
        return tuned("rms_norm", "backward", torch.device("cuda", 0), 1024)

    table = {name: {"rms_norm": {"backward": [{"up_to": 1024, "launch": [name]}]}} for name in ("default", "sm_90")}
    monkeypatch.setattr(triton_support, "_table", lambda: table)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, expected in (((9, 0), "sm_90"), ((12, 3), "default")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert ask() == (expected,)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert ask() == ("default",)
    tuned.cache_clear()


def test_a_candidate_of_the_tuner_reaches_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tune

    monkeypatch.setattr(triton_launch, "tuned", tuned)  # put back afterwards what tune.use replaces
    for elements, warps in ((4096, 8), (1024, 2)):
        tune.use("rms_norm", (elements, warps, 4, 3))
        shape = triton_launch.tiling_of(torch.device("cpu"), "backward", 512, 10**6)
        assert (shape.rows_each, shape.warps, shape.stages) == (elements // 512, warps, 3)


# --- availability -----------------------------------------------------------------------------------------------------


def test_it_is_available_here_and_refuses_sites_elsewhere() -> None:
    assert triton_support.available() == (True, None)
    site = Site(None, "x", None, "x", None, torch.device(DEVICE), None, None)  # type: ignore[arg-type]
    assert triton_support.device_reason(site) is None
    elsewhere = triton_support.device_reason(dataclasses.replace(site, device=torch.device("meta")))
    assert elsewhere is not None
    assert (elsewhere.code, "kernelize(model, device=" in str(elsewhere)) == ("device", True)
