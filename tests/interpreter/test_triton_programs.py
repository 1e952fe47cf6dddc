"""Launches of Triton kernels: what is remembered of them, on which device they are made, their scratch memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.support.triton_device import DEVICE, NO_GPU, ON_GPU, laid_out
from twinkle import triton_programs
from twinkle.kernel.ops.glu.triton import fused_glu, glu
from twinkle.kernel.ops.rms_norm import triton as rms_norm_backend
from twinkle.kernel.ops.rms_norm.reference import rms_norm as formula
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.memory import Memory
from twinkle.triton_programs import Launch, Program, Workspace, workspace

# --- programs ---------------------------------------------------------------------------------------------------------


class _Kernel:
    """Notes what it is launched with, in the place of a kernel for a GPU."""

    arg_names: tuple[str, ...] = ("a", "b", "n", "SIZE")

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


def test_scratch_memory_comes_after_the_tensors(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Workspace(torch.device("cpu"), 3, 8)
    monkeypatch.setattr(triton_programs, "workspace", lambda first, counters, floats: room)
    kernel.arg_names = ("a", "b", "floats", "counters", "n", "SIZE")
    program, (first, nothing) = Program(kernel, MADE._replace(scratch=(3, 8))), tensors()
    program(first, nothing)
    program(first, nothing)
    assert kernel.compiled == [((7,), first, None, room.floats, room.counters, 5, {"SIZE": 16, "num_warps": 4})]
    addresses = first.data_ptr(), None, room.floats.data_ptr(), room.counters.data_ptr()
    assert kernel.quick == [((7, 1, 1), *addresses, 5, 16)]


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

    monkeypatch.setattr(triton_programs, "workspace", note)
    monkeypatch.setattr(rms_norm_backend, "_layouts", Memory())
    weight = laid_out((8,), torch.float32, "contiguous", 2).requires_grad_()
    for rows in (1, 300, 9000):
        x = laid_out((rows, 8), torch.float32, "contiguous", rows)
        rms_norm(x, weight, None, 1e-6, 0.0, "before").sum().backward()
        assert not rooms[-1].counters.any()
    assert len(rooms) == 3


def test_a_compiler_makes_scratch_memory_without_addresses() -> None:
    with FakeTensorMode():
        room = Workspace(torch.device(DEVICE), 3, 8)
    assert (room.counters.shape, room.floats.shape) == ((3,), (8,))


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_a_stream_keeps_its_workspace_and_a_graph_gets_one_of_its_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.empty(0, device=device)
    first = workspace(there, 4, 100)
    assert workspace(there, 4, 100) is first
    larger = workspace(there, 4, first.floats.numel() + 1)
    assert larger is not first and workspace(there, 1, 1) is larger
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace(there, 1, 1) is not larger
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert workspace(there, 1, 1) is not workspace(there, 1, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not ON_GPU, reason="needs two GPUs")
def test_a_tensor_on_another_than_the_current_device() -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, weight = (t.to(device).requires_grad_() for t in (torch.randn(64, 128), torch.randn(128)))
        y, expected = rms_norm(x, weight, None, 1e-6, 0.0, "before"), formula(x, weight, 1e-6)
        torch.testing.assert_close(y, expected)
        ours, theirs = (torch.autograd.grad(t.square().sum(), (x, weight)) for t in (y, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.cuda.current_device() == 0
