"""What the Triton kernels of all ops share: availability, addressing without copies, and the way under a compiler."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import importlib.util
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from twinkle.platforms import platform_of
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

GPU_TYPES = ("cuda", "xpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def interpreted() -> bool:
    """Whether Triton runs its programs on the CPU: decided when Triton is imported, by TRITON_INTERPRET."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def available() -> tuple[bool, Reason | None]:
    """Whether Triton is here and has something to run on."""
    if importlib.util.find_spec("triton") is None:
        return False, Reason("no-package", "the package triton is not installed", "pip install triton, where a GPU is")
    try:
        if interpreted():
            return True, None
    except Exception as error:
        return False, Reason.of_error(error, "broken-package", "importing triton")
    found = [kind for kind in GPU_TYPES if platform_of(kind) is not None]
    hint = "set TRITON_INTERPRET=1 before triton is imported to run its programs on the CPU, for tests"
    return (True, None) if found else (False, Reason("no-device", "Triton has no GPU to run on", hint))


def device_reason(site: Site) -> Reason | None:
    """Why Triton can't run on a site's device."""
    if launchable(site.device):
        return None
    kind = site.device.type
    hint = "say where the model will run: kernelize(model, device=…)" if kind == "meta" else None
    return Reason("device", f"Triton doesn't run on {kind}", hint)


class Rows(NamedTuple):
    """How to find the rows of a tensor ``[..., H]`` without a copy: up to three row dimensions and their strides.

    Those that are there come first. A missing one has size 1, which Triton compiles in, so that no division is left.
    """

    total: int
    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    stride: int
    column_stride: int


@functools.lru_cache(maxsize=4096)
def rows_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Rows | None:
    """The rows of a tensor as it lies; None when more than three row dimensions are left after merging neighbours."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 3:
        return None
    (outer, outer_stride), (middle, middle_stride), (inner, stride) = merged + [(1, 0)] * (3 - len(merged))
    column_stride = strides[-1] if shape[-1] != 1 else 1
    return Rows(outer * middle * inner, middle, inner, outer_stride, middle_stride, stride, column_stride)


def far(*extents: tuple[int, int]) -> bool:
    """Whether some dimension of a tile reaches further than 32 bits count: of pairs ``(size, stride)``."""
    return any((size - 1) * stride >= 2**31 for size, stride in extents if stride > 1)


@functools.lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """How many multiprocessors a device has; a few where programs are interpreted."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).max_compute_units
    return 4


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

    def __init__(self, device: torch.device, counters: int, floats: int) -> None:
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.floats = torch.empty(floats, dtype=torch.float32, device=device)


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def workspace(device: torch.device, counters: int, floats: int) -> Workspace:
    """The current stream's workspace, at least that large.

    A captured graph may be replayed beside anything, so it gets one of its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return Workspace(device, counters, floats)
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))
    found = _workspaces.get(key)
    if found is None or found.floats.numel() < floats or found.counters.numel() < counters:
        found = _workspaces[key] = Workspace(device, counters, floats)
    return found


_launchable: tuple[str, ...] = ()


def launchable(device: torch.device) -> bool:
    """Whether Triton can run programs on a device."""
    global _launchable
    if not _launchable:
        _launchable = (*GPU_TYPES, "cpu") if interpreted() else GPU_TYPES
    return device.type in _launchable


def transformed() -> bool:
    """Whether a functorch transform (``vmap``, ``grad``, …) or forward-mode differentiation is running.

    Autograd functions here have no rules for them.
    """
    if is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def call_reason(*tensors: torch.Tensor | None) -> str | None:
    """Why a call can't be served; None for the ordinary one, at the cost of a few attribute reads.

    Args:
        tensors: what the kernel reads; None ones, but for the first, are skipped.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    if not launchable(device):
        return "the tensor is on a device that Triton doesn't run on"
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:
            return "a tensor subclass"
        if tensor.dtype not in DTYPES:
            return "the dtype is none of fp32, bf16, fp16"
        if tensor.device != device:
            return "the tensors are on different devices"
    if first.numel() == 0:
        return "an empty tensor"
    return "inside a functorch transform or forward-mode differentiation" if transformed() else None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether the rows of a tensor ``[..., H]`` can be addressed as they lie."""
    return tensor.is_contiguous() or rows_of(tensor.shape, tensor.stride()) is not None


def rows_reason(*tensors: torch.Tensor | None) -> str | None:
    """Why the rows of tensors can't be addressed as they lie. Under a compiler they are made contiguous."""
    for tensor in tensors:
        if tensor is not None and (tensor.dim() == 0 or not (is_compiling() or has_rows(tensor))):
            return "no rows, or rows along more than three dimensions that don't merge"
    return None


@functools.cache
def _table() -> dict[str, Any]:
    text = importlib.resources.files("twinkle.kernel.ops").joinpath("triton_tuning.json").read_text()
    return json.loads(text)


@functools.lru_cache(maxsize=256)
def tuned(op: str, direction: str, device: torch.device, block: int) -> tuple[int, ...]:
    """The launch configuration that measured best for a block size on a device's architecture.

    Architectures that nobody measured get the entry ``default``: small enough to run anywhere.
    """
    architecture = "default"
    if device.type == "cuda" and torch.version.hip is None:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    table = _table()
    choices = table.get(architecture, table["default"])[op][direction]
    return next(tuple(choice["launch"]) for choice in choices if block <= choice["up_to"])


class Launch(NamedTuple):
    """Everything of one kernel launch but its tensors: grid, the arguments after the tensors, compile-time values."""

    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


MOST_PREPARED = 8192
"""How many launches are remembered. Every shape leaves one; when that many have come, all are forgotten."""

_prepared: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, key: Any, tensors: tuple[torch.Tensor | None, ...], make: Callable[[], Launch]) -> None:
    """Launches a kernel eagerly; a launch like an earlier one costs little more than the driver's call.

    Triton finds the compiled program anew at each call, from every argument. Here it is looked up by ``key``.

    Args:
        kernel: a ``@triton.jit`` function whose first parameters are the tensors.
        key: determines what ``make`` gives, and the tensors' dtypes and device.
        tensors: the pointers, in the kernel's order; the first is never None, and says on which device.
        make: computes the launch, when the key is new.
    """
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    aligned = addresses % 16 == 0
    # Programs are compiled for pointers that are multiples of 16; others take Triton's own way.
    prepared = _prepared.get((id(kernel), key)) if aligned else None
    if prepared is not None:
        call, rest = prepared
        call(*tensors, *rest)
        return
    made = make()
    first = tensors[0]
    assert first is not None
    with on_device(first):
        program = kernel[made.grid](*tensors, *made.scalars, **made.constants, num_warps=made.warps)
    if aligned and hasattr(program, "packed_metadata"):  # an interpreter gives nothing back
        if len(_prepared) >= MOST_PREPARED:
            _prepared.clear()
        constants = tuple(made.constants[name] for name in kernel.arg_names[len(tensors) + len(made.scalars) :])
        _prepared[id(kernel), key] = _prepare(program, made.grid, first.device), (*made.scalars, *constants)


def _prepare(program: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """A compiled program's launch on the device's current stream, as a function of all its arguments."""
    import triton

    grid = (*grid, 1, 1)[:3]  # a compiled program wants all three
    call = _quick(program, grid, device) if triton.__version__.startswith("3.6.") else program[grid]
    if not several_devices():
        return call

    def call_there(first: torch.Tensor, *rest: Any) -> None:
        with on_device(first):
            call(first, *rest)

    return call_there


def _quick(program: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """What ``program[grid]`` does in Triton 3.6, but for the records that it makes for hooks that nobody has set.

    They take half of its time.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    public, run, function, metadata = program[grid], program.run, program.function, program.packed_metadata
    stream, index, hooks = driver.active.get_current_stream, device.index, knobs.runtime

    def call(*arguments: Any) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            public(*arguments)
        else:
            run(*grid, stream(index), function, metadata, None, None, None, *arguments)

    return call


def gradients_with_graph(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor | None, ...],
    needed: tuple[bool, ...],
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``function(*inputs)`` in a form that can be differentiated again: for ``create_graph=True``.

    Args:
        function: made of operators that know their derivatives.
        needed: which inputs' gradients are wanted; None is returned for the others.
        grad: the gradient of the result.
    """
    # Through aliases: of an input that another one was computed from, only its own part belongs here.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wanted = [alias for alias, is_needed in zip(aliases, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(function(*aliases), wanted, grad, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(found) if is_needed else None for is_needed in needed)


def launch_traced(kernel: Any, key: Any, tensors: tuple[torch.Tensor | None, ...], make: Callable[[], Launch]) -> None:
    """The same inside a library operator, in a way that a compiler can see through."""
    made = make()
    kernel = kernel if interpreted() else torch.library.wrap_triton(kernel)
    kernel[made.grid](*tensors, *made.scalars, **made.constants, num_warps=made.warps)


Launcher = Callable[[Any, Any, tuple[torch.Tensor | None, ...], Callable[[], Launch]], None]


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
