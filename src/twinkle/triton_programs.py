"""Launching Triton kernels, of both levels: eagerly at little more than the driver's cost, and under a compiler so that
it can see in.

Triton finds the compiled program anew at each call, from every argument. Here an op remembers, for each layout of
tensors that it meets, a :class:`Program`: everything of the launch but the addresses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from twinkle.naming import dtype_name
from twinkle.platforms import platform_of
from twinkle.reasons import Reason


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its programs on the CPU: decided when Triton is imported, by TRITON_INTERPRET."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def device_types(kinds: tuple[str, ...], nowhere: str, install: str) -> frozenset[str] | Reason:
    """The device types whose memory Triton's programs can work on here, or why there is none.

    Args:
        kinds: the device types that the programs are for, in the order of preference.
        nowhere: what to say where none of them is.
        install: the command that brings Triton.
    """
    gpu = next((kind for kind in kinds if platform_of(kind) is not None), None)
    if importlib.util.find_spec("triton") is None:  # without a device, installing it would only lead to the next reason
        no_package = Reason("no-package", "the package triton is not installed", install)
        return no_package if gpu else Reason("no-device", nowhere)
    try:
        import triton

        if bool(triton.knobs.runtime.interpret) is not interpreted():
            hint = "set it before the first import, or not at all"
            return Reason("interpreter", "TRITON_INTERPRET was changed after triton was imported", hint)
    except Exception as error:
        return Reason.of_error(error, "broken-package", "importing triton")
    if interpreted():
        return frozenset({"cpu", gpu} - {None})  # type: ignore[arg-type]
    if gpu is None:
        return Reason("no-device", nowhere, "for tests: TRITON_INTERPRET=1")
    try:
        # The device may be there and Triton's driver not work, e.g. for want of a C compiler.
        assert triton.runtime.driver.active is not None
    except Exception as error:
        return Reason.of_error(error, "no-driver", f"asking Triton for its {gpu} driver")
    return frozenset({gpu})


class Launch(NamedTuple):
    """Everything of one kernel launch but its tensors: grid, the arguments after the tensors, compile-time values.

    ``views`` are the dtypes as whose elements the kernel sees the first tensors' memory; None leaves a tensor its own.
    ``scratch`` are the sizes of a :class:`Workspace` whose floats and counters come after the tensors; None for none.
    """

    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    views: tuple[torch.dtype | None, ...] = ()
    scratch: tuple[int, int] | None = None


NO_SCRATCH = None, None
"""The first scalars of a kernel that would have a Workspace, where it needs none."""


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
        self._start: Callable[[list[Any]], None] | None = None
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
        room = None
        if self.launch.scratch is not None:
            room = workspace(tensors[0], *self.launch.scratch)  # type: ignore[arg-type]
            pointers += room.addresses
        # Programs are compiled for pointers that are multiples of 16; others take Triton's own way.
        aligned = addresses % 16 == 0
        if aligned and self._start is not None:
            pointers += self._rest
            self._start(pointers)
        else:
            self._as_triton_does(tensors if room is None else (*tensors, room.floats, room.counters), aligned)

    def _as_triton_does(self, tensors: tuple[torch.Tensor | None, ...], aligned: bool) -> None:
        first = tensors[0]
        assert first is not None
        grid, scalars, constants, warps, views, _ = self.launch
        with on_device(first):
            program = self.kernel[grid](*_seen_as(tensors, views), *scalars, **constants, num_warps=warps)
        if aligned and hasattr(program, "packed_metadata"):  # an interpreter gives nothing back
            names = self.kernel.arg_names[len(tensors) + len(scalars) :]
            self._rest = (*scalars, *(constants[name] for name in names))
            self._start = _start(program, grid, first.device)


def _seen_as(tensors: tuple[torch.Tensor | None, ...], views: tuple[torch.dtype | None, ...]) -> tuple[Any, ...]:
    """The tensors as a kernel gets them. PyTorch sees no view of any."""
    if not any(views):
        return tensors
    import triton

    names = {dtype: getattr(triton.language, dtype_name(dtype)) for dtype in views if dtype}
    first = (triton.reinterpret(t, names[dtype]) if dtype else t for t, dtype in zip(tensors, views, strict=False))
    return (*first, *tensors[len(views) :])


def _start(program: Any, grid: tuple[int, ...], device: torch.device) -> Callable[[list[Any]], None]:
    """A compiled program's launch on the device's current stream, as a function of the list of all its arguments."""
    import triton

    grid = (*grid, 1, 1)[:3]  # a compiled program wants all three
    quick = None
    if triton.__version__.startswith("3.6.") and device.type == "cuda" and torch.version.hip is None:
        quick = _quick(program, grid, device)
    start = quick or (lambda arguments: program[grid](*arguments))
    if not several_devices(device.type):
        return start
    module, index = torch.get_device_module(device), device.index
    # The same without asking each time whether CUDA was initialised.
    current_device = torch._C._cuda_getDevice if device.type == "cuda" else module.current_device

    def start_there(arguments: list[Any]) -> None:
        if current_device() == index:
            start(arguments)
        else:
            with module.device(device):
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
        assert not any(launch.views), "a compiler would see other dtypes than the kernel"
        self.kernel = kernel if interpreted() else torch.library.wrap_triton(kernel)
        self.launch = launch

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        grid, scalars, constants, warps, _, scratch = self.launch
        if scratch is not None:
            room = Workspace(tensors[0].device, *scratch)  # type: ignore[union-attr]
            tensors = (*tensors, room.floats, room.counters)
        self.kernel[grid](*tensors, *scalars, **constants, num_warps=warps)


Make = Callable[[Any, Launch], Callable[..., None]]
"""``Program`` or ``Traced``: makes a function of the tensors from a kernel and its launch."""


# --- devices and streams ----------------------------------------------------------------------------------------------


def on_device(tensor: torch.Tensor) -> Any:
    """Makes the tensor's device the current one for a launch; nothing to do when it is."""
    device = tensor.device
    if several_devices(device.type):
        module = torch.get_device_module(device)
        if device.index != module.current_device():
            return module.device(device)
    return _NOTHING


_NOTHING = contextlib.nullcontext()


@functools.cache
def several_devices(kind: str) -> bool:
    """Whether a tensor's device, of that type, may be another one than the current."""
    return kind not in ("cpu", "meta") and torch.get_device_module(kind).device_count() > 1


class Workspace:
    """Scratch memory of one stream, whose launches follow one another: counters that every launch leaves as zeros, and
    room for partial sums."""

    def __init__(self, device: torch.device, counters: int, floats: int) -> None:
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.floats = torch.empty(floats, dtype=torch.float32, device=device)
        self.size = counters, floats

    @functools.cached_property
    def addresses(self) -> tuple[int, int]:
        """What a launch needs of it. Asked for only then, since in a compiler's hands the tensors have none."""
        return self.floats.data_ptr(), self.counters.data_ptr()


_workspaces: dict[tuple[int, int], Workspace] = {}


def workspace(first: torch.Tensor, counters: int, floats: int) -> Workspace:
    """The workspace of the current stream of a tensor's device, at least that large.

    A captured graph may be replayed beside anything, so it gets one of its own.
    """
    if not first.is_cuda or torch._C._cuda_isCurrentStreamCapturing():
        return Workspace(first.device, counters, floats)
    index = first.get_device()
    key = index, torch._C._cuda_getCurrentRawStream(index)
    found = _workspaces.get(key)
    if found is None or found.size[0] < counters or found.size[1] < floats:
        found = _workspaces[key] = Workspace(first.device, counters, floats)
    return found
