"""What the Triton kernels of all ops share: where they run, which calls they take, how they find their rows, tuning."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_compiling

from twinkle.kernel.ops.torch_support import DTYPES, PLAIN, elsewhere, transformed
from twinkle.reasons import Reason
from twinkle.triton_programs import device_types, interpreted

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

GPU_TYPES = ("cuda", "xpu")


def available() -> tuple[bool, Reason | None]:
    """Whether Triton is here and has something to run on."""
    found = device_types(GPU_TYPES, "Triton has no GPU to run on", "pip install triton")
    return (False, found) if isinstance(found, Reason) else (True, None)


def device_reason(site: Site) -> Reason | None:
    """Why Triton can't run on a site's device."""
    if launchable(site.device):
        return None
    return elsewhere(site, f"Triton doesn't run on {site.device.type}")


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


_launchable: tuple[str, ...] = ()


def launchable(device: torch.device) -> bool:
    """Whether Triton can run programs on a device."""
    global _launchable
    if not _launchable:
        _launchable = (*GPU_TYPES, "cpu") if interpreted() else GPU_TYPES
    return device.type in _launchable


def call_reason(*tensors: torch.Tensor | None) -> str | None:
    """Why a call can't be served; None for the ordinary one, at the cost of a few attribute reads.

    Args:
        tensors: what the kernel reads; None ones, but for the first, are skipped.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    if not (first.is_cuda or launchable(device)):  # a device's type is a string, made anew each time
        return "the tensor is on a device that Triton doesn't run on"
    compiling = is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return "a tensor subclass"
        if not compiling:
            if _of_transform(tensor):
                return "a tensor of a functorch transform"  # maybe of one that is over, which has no memory of its own
            if tensor.is_neg():
                return "a negated tensor"  # whose memory has the other signs
        if tensor.dtype not in DTYPES:
            return "the dtype is none of fp32, bf16, fp16"
        if tensor.device != device:
            return "the tensors are on different devices"
    if first.numel() == 0:
        return "an empty tensor"
    return None if compiling else transformed()


_of_transform = torch._C._functorch.is_functorch_wrapped_tensor


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

    What nobody measured on an architecture gets the entry ``default``: small enough to run anywhere.
    """
    architecture = "default"
    if device.type == "cuda" and torch.version.hip is None:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    table = _table()
    choices = (table.get(architecture, {}).get(op) or table["default"][op])[direction]
    return next(tuple(choice["launch"]) for choice in choices if block <= choice["up_to"])


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
