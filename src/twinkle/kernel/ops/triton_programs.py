"""Launching Triton kernels: eagerly at little more than the driver's cost, and under a compiler so that it can see in.

Triton finds the compiled program anew at each call, from every argument. Here an op remembers, for each layout of
tensors that it meets, a :class:`Program`: everything of the launch but the addresses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from twinkle.kernel.ops.triton_support import interpreted, launchable

T = TypeVar("T")


class Launch(NamedTuple):
    """Everything of one kernel launch but its tensors: grid, the arguments after the tensors, compile-time values."""

    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


class Program:
    """A kernel for tensors of one layout.

    Attributes:
        kernel: a ``@triton.jit`` function whose first parameters are the tensors.
        launch: the same whatever the tensors are, as long as their shapes, strides, dtypes and device are.
    """

    __slots__ = ("_rest", "_start", "kernel", "launch")

    def __init__(self, kernel: Any, launch: Launch) -> None:
        self.kernel = kernel
        self.launch = launch
        self._start: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launches it on the tensors, in the kernel's order; the first is never None, and says on which device."""
        pointers: list[Any] = []
        addresses = 0
        for tensor in tensors:
            pointer = None
            if tensor is not None:
                pointer = tensor.data_ptr()
                addresses |= pointer
            pointers.append(pointer)
        # Programs are compiled for pointers that are multiples of 16; others take Triton's own way.
        aligned = addresses % 16 == 0
        if aligned and self._start is not None:
            pointers += self._rest
            self._start(pointers)
        else:
            self._as_triton_does(tensors, aligned)

    def _as_triton_does(self, tensors: tuple[torch.Tensor | None, ...], aligned: bool) -> None:
        first = tensors[0]
        assert first is not None
        grid, scalars, constants, warps = self.launch
        with on_device(first):
            program = self.kernel[grid](*tensors, *scalars, **constants, num_warps=warps)
        if aligned and hasattr(program, "packed_metadata"):  # an interpreter gives nothing back
            names = self.kernel.arg_names[len(tensors) + len(scalars) :]
            self._rest = (*scalars, *(constants[name] for name in names))
            self._start = _start(program, grid, first.device)


def _start(program: Any, grid: tuple[int, ...], device: torch.device) -> Callable[[list[Any]], None]:
    """A compiled program's launch on the device's current stream, as a function of the list of all its arguments."""
    import triton

    grid = (*grid, 1, 1)[:3]  # a compiled program wants all three
    quick = None
    if triton.__version__.startswith("3.6.") and device.type == "cuda" and torch.version.hip is None:
        quick = _quick(program, grid, device)
    start = quick or (lambda arguments: program[grid](*arguments))
    if device.type != "cuda" or not several_devices():
        return start

    def start_there(arguments: list[Any]) -> None:
        if torch.cuda.current_device() == device.index:
            start(arguments)
        else:
            with torch.cuda.device(device):
                start(arguments)

    return start_there


def _quick(program: Any, grid: tuple[int, ...], device: torch.device) -> Callable[[list[Any]], None] | None:
    """What ``program[grid]`` does in Triton 3.6, but for the records that it makes for hooks that nobody has set.

    They take half of its time. None for a program that needs scratch memory.
    """
    from triton import knobs

    launcher, function, metadata = program.run, program.function, program.packed_metadata
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    public, start, hooks = program[grid], launcher.launch, knobs.runtime
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    stream, index = torch._C._cuda_getCurrentRawStream, device.index
    x, y, z = grid

    def call(arguments: list[Any]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            public(*arguments)
            return
        at = stream(index)
        start(x, y, z, at, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments)

    return call


class Traced:
    """The same inside a library operator, in a way that a compiler can see through. Used once."""

    def __init__(self, kernel: Any, launch: Launch) -> None:
        self.kernel = kernel if interpreted() else torch.library.wrap_triton(kernel)
        self.launch = launch

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        grid, scalars, constants, warps = self.launch
        self.kernel[grid](*tensors, *scalars, **constants, num_warps=warps)


Make = Callable[[Any, Launch], Callable[..., None]]
"""``Program`` or ``Traced``: makes a function of the tensors from a kernel and its launch."""


class Memory(dict[Any, T]):
    """What was found out about layouts of tensors, by a key that tells them apart."""

    MOST = 4096
    """Every shape leaves an entry; when that many have come, all are forgotten."""

    def add(self, key: Any, value: T) -> T:
        if len(self) >= self.MOST:
            self.clear()
        self[key] = value
        return value


# --- devices and streams ----------------------------------------------------------------------------------------------


def on_device(tensor: torch.Tensor) -> Any:
    """Makes the tensor's device the current one for a launch; nothing to do when it is."""
    if tensor.is_cuda and several_devices() and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NOTHING


_NOTHING = contextlib.nullcontext()


@functools.cache
def several_devices() -> bool:
    """Whether a tensor's device may be another one than the current."""
    return torch.cuda.device_count() > 1


class Workspace:
    """Scratch memory of one stream, whose launches follow one another: counters that every launch leaves as zeros, and
    room for partial sums."""

    __slots__ = ("counters", "floats", "size")

    def __init__(self, device: torch.device, counters: int, floats: int) -> None:
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.floats = torch.empty(floats, dtype=torch.float32, device=device)
        self.size = counters, floats


_workspaces: dict[tuple[int, int], Workspace] = {}


def workspace(device: torch.device, counters: int, floats: int) -> Workspace:
    """The current stream's workspace, at least that large.

    A captured graph may be replayed beside anything, so it gets one of its own.
    """
    if device.type != "cuda" or torch._C._cuda_isCurrentStreamCapturing():
        return Workspace(device, counters, floats)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _workspaces.get(key)
    if found is None or found.size[0] < counters or found.size[1] < floats:
        found = _workspaces[key] = Workspace(device, counters, floats)
    return found


# --- under a compiler -------------------------------------------------------------------------------------------------


def library_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that launches Triton kernels an operator that compilers can trace.

    On a GPU a ``triton_op``, into whose kernel inductor can see; where Triton is interpreted an opaque ``custom_op``.

    Args:
        name: ``"twinkle::…"``.
        fake: gives empty results of the right shapes, dtypes and strides.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        launchable(torch.device("meta"))  # finds out what a compiler could not trace
        make: Any = torch.library.custom_op if interpreted() else torch.library.triton_op
        op = make(name, function, mutates_args=())
        op.register_fake(fake)
        return op

    return decorate
