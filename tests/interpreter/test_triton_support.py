"""What all Triton kernels share: addressing, remembered launches, workspaces, tuned configurations, availability."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from importlib import resources
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.triton_device import DEVICE, NO_GPU, ON_GPU, examples, laid_out
from twinkle import triton_programs
from twinkle.kernel.ops import triton_support
from twinkle.kernel.ops.glu.triton import fused_glu, glu
from twinkle.kernel.ops.rms_norm import triton as rms_norm_backend
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.rms_norm.reference import rms_norm as formula
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.kernel.ops.triton_support import far, rows_of, tuned
from twinkle.kernel.targets import Site
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Program, Workspace, workspace

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


# --- programs ---------------------------------------------------------------------------------------------------------


class _Kernel:
    """Notes what it is launched with, in the place of a kernel for a GPU."""

    arg_names = ("a", "b", "n", "SIZE")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.quick: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((grid, *arguments, constants))
            return _Compiled(self)

        return run


class _Compiled:
    packed_metadata = "metadata"

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.quick.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    monkeypatch.setattr(triton_programs, "several_devices", lambda kind: False)
    return _Kernel()


def tensors(offset: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.zeros(32, dtype=torch.bfloat16)[offset:][:16], None


MADE = Launch((7,), (5,), {"SIZE": 16}, 4)


def test_from_the_second_launch_on_a_program_is_started_at_once(kernel: _Kernel) -> None:
    first, second = tensors(), tensors()
    program = Program(kernel, MADE)
    program(*first)
    program(*second)
    assert kernel.compiled == [((7,), *first, 5, {"SIZE": 16, "num_warps": 4})]
    assert kernel.quick == [((7, 1, 1), second[0].data_ptr(), None, 5, 16)]


def test_programs_are_apart(kernel: _Kernel) -> None:
    for _ in range(2):
        Program(kernel, MADE)(*tensors())
    assert (len(kernel.compiled), kernel.quick) == (2, [])


def test_a_misaligned_tensor_takes_tritons_own_way(kernel: _Kernel) -> None:
    """Programs are compiled for addresses that are multiples of 16."""
    program = Program(kernel, MADE)
    program(*tensors(1))
    program(*tensors())
    for _ in range(2):
        program(*tensors(1))
    assert (len(kernel.compiled), kernel.quick) == (4, [])
    program(*tensors(8))
    assert (len(kernel.compiled), len(kernel.quick)) == (4, 1)


def test_a_kernel_sees_memory_as_elements_of_another_dtype(kernel: _Kernel) -> None:
    """While it is compiled; afterwards an address is all that it gets."""
    import triton.language as tl

    first, _ = tensors()
    program = Program(kernel, MADE._replace(views=(torch.int16,)))
    program(first, None)
    program(first, None)
    (_, seen, nothing, *_), (started,) = kernel.compiled[0], kernel.quick
    assert (seen.base is first, seen.dtype, nothing) == (True, tl.int16, None)
    assert started == ((7, 1, 1), first.data_ptr(), None, 5, 16)
    other, _ = tensors(1)
    program(other, None)
    assert kernel.compiled[1][1].base is other, "a misaligned one too"


class _Devices:
    """Several accelerators, in the place of a device module of PyTorch; the tests' tensors lie on another one."""

    current = 1

    def __init__(self) -> None:
        self.entered: list[torch.device] = []

    def current_device(self) -> int:
        return self.current

    def device(self, device: torch.device) -> Any:
        self.entered.append(device)
        return contextlib.nullcontext()


def test_a_launch_is_made_on_the_device_of_the_tensors(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, (first, _) = _Devices(), tensors()
    monkeypatch.setattr(triton_programs, "several_devices", lambda kind: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    program = Program(kernel, MADE)
    program(first, None)
    program(first, None)
    program(first, None)
    assert devices.entered == [first.device] * 3 and len(kernel.quick) == 2
    monkeypatch.setattr(devices, "current", first.device.index)
    program(first, None)
    assert len(devices.entered) == 3, "it is the current one already"


def test_no_more_layouts_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "MOST", 3)
    memory: Memory[int] = Memory()
    for number in range(5):
        assert memory.add(number, 10 * number) == 10 * number == memory.get(number)
        assert len(memory) <= 3
    assert memory == {3: 30, 4: 40}


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_hooks_of_triton_are_called() -> None:
    """Although the quick way of a launch leaves out what makes their records."""
    import triton

    x, weight = (laid_out(shape, torch.float32, "contiguous", 1) for shape in ((4, 64), (64,)))
    call = lambda: rms_norm(x, weight, None, 1e-6, 0.0, "before")  # noqa: E731
    expected, seen = [call() for _ in range(2)][1], []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert torch.equal(call(), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert torch.equal(call(), expected)
    assert seen == ["forward_kernel"]


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_another_triton_gets_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.7.0")
    monkeypatch.setattr(triton_programs, "_quick", lambda *_: pytest.fail("it is for another version"))
    monkeypatch.setattr(rms_norm_backend, "_layouts", Memory())
    x, weight = (laid_out(shape, torch.float32, "contiguous", 1) for shape in ((4, 64), (64,)))
    for _ in range(2):
        y = rms_norm(x, weight, None, 1e-6, 0.0, "before")
        torch.testing.assert_close(y, formula(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_real_launches_alternate_between_aligned_and_not(dtype: torch.dtype) -> None:
    """The same shapes and strides, so the same key, at addresses of every kind."""
    room = laid_out((8, 64), dtype, "contiguous", 1).flatten()
    weight = laid_out((16,), dtype, "contiguous", 2)
    for offset in (0, 1, 16, 3, 0, 8, 2):
        x = room[offset : offset + 128].view(8, 16)
        expected = formula(x, weight, 1e-6, compute_dtype=torch.float64).to(dtype)
        torch.testing.assert_close(rms_norm(x, weight, None, 1e-6, 0.0, "before"), expected, rtol=2e-2, atol=2e-2)
        shifted = torch.empty(17, dtype=dtype, device=DEVICE)[1:].copy_(weight)
        torch.testing.assert_close(rms_norm(x, shifted, None, 1e-6, 0.0, "before"), expected, rtol=2e-2, atol=2e-2)
        up = room[offset + 128 : offset + 256].view(8, 16)
        product = (torch.nn.functional.silu(x.double()) * up.double()).to(dtype)
        torch.testing.assert_close(glu(x, up, "silu"), product, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(fused_glu(torch.cat((x, up), -1), "silu"), product, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_real_launches_are_remembered_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Memory[Any] = Memory()
    monkeypatch.setattr(rms_norm_backend, "_layouts", memory)
    monkeypatch.setattr(Memory, "MOST", 3)
    weight = laid_out((64,), torch.float32, "contiguous", 2).requires_grad_()
    for rows in (1, 2, 3, 4, 5, 1, 2):
        for seed in (1, 2):
            x = laid_out((rows, 64), torch.float32, "contiguous", seed).requires_grad_()
            y, expected = rms_norm(x, weight, None, 1e-6, 0.0, "before"), formula(x, weight, 1e-6)
            seeds = torch.ones_like(y)
            for ours, theirs in zip(
                (y, *torch.autograd.grad(y, (x, weight), seeds)),
                (expected, *torch.autograd.grad(expected, (x, weight), seeds)),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert 0 < len(memory) <= 3


# --- workspaces -------------------------------------------------------------------------------------------------------


def test_counters_are_zeros_after_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Workspace] = []

    def note(*arguments: Any) -> Workspace:
        rooms.append(workspace(*arguments))
        return rooms[-1]

    monkeypatch.setattr(rms_norm_backend, "workspace", note)
    monkeypatch.setattr(rms_norm_backend, "_layouts", Memory())
    weight = laid_out((8,), torch.float32, "contiguous", 2).requires_grad_()
    for rows in (1, 300, 9000):
        x = laid_out((rows, 8), torch.float32, "contiguous", rows)
        rms_norm(x, weight, None, 1e-6, 0.0, "before").sum().backward()
        assert not rooms[-1].counters.any()
    assert len(rooms) == 3


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_a_stream_keeps_its_workspace_and_a_graph_gets_one_of_its_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = workspace(device, 4, 100)
    assert workspace(device, 4, 100) is first
    larger = workspace(device, 4, first.floats.numel() + 1)
    assert larger is not first and workspace(device, 1, 1) is larger
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace(device, 1, 1) is not larger
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert workspace(device, 1, 1) is not workspace(device, 1, 1)


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
            shape = triton_launch.shape_of(torch.device("cpu"), direction, width, 1000)
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
        shape = triton_launch.shape_of(torch.device("cpu"), "backward", 512, 10**6)
        assert (shape.rows_each, shape.warps, shape.stages) == (elements // 512, warps, 3)


# --- availability -----------------------------------------------------------------------------------------------------


def test_it_is_available_here_and_refuses_sites_elsewhere() -> None:
    assert triton_support.available() == (True, None)
    site = Site(None, "x", None, "x", None, torch.device(DEVICE), None, None)  # type: ignore[arg-type]
    assert triton_support.device_reason(site) is None
    elsewhere = triton_support.device_reason(dataclasses.replace(site, device=torch.device("meta")))
    assert elsewhere is not None
    assert (elsewhere.code, "kernelize(model, device=" in str(elsewhere)) == ("device", True)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not ON_GPU, reason="needs two GPUs")
def test_a_tensor_on_another_than_the_current_device() -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, weight = (t.to(device).requires_grad_() for t in (torch.randn(64, 128), torch.randn(128)))
        y, expected = rms_norm(x, weight, None, 1e-6, 0.0, "before"), formula(x, weight, 1e-6)
        torch.testing.assert_close(y, expected)
        ours, theirs = (torch.autograd.grad(t.square().sum(), (x, weight)) for t in (y, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.cuda.current_device() == 0
