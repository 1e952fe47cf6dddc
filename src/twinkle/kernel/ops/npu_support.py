"""What the ``npu`` backends share: whether torch_npu's functions are here, and which tensors they take.

The backends call functions of torch_npu in both directions, inside autograd Functions of ours: the package publishes
backward operators, but not which of its forward operators are differentiable, which has changed between versions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from twinkle.kernel.ops.torch_support import DTYPES, PLAIN, elsewhere, transformed
from twinkle.platforms import get_platform
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

DEVICE = "npu"

Functions = Mapping[str, tuple[str, ...]]
"""Function of torch_npu -> the parameters that are given by name."""


def available(functions: Functions) -> tuple[bool, Reason | None]:
    """Whether an Ascend NPU is here, and a torch_npu that has the functions with these parameters.

    Args:
        functions: what a backend calls.
    """
    missing = get_platform("ascend").missing() or _lacking(functions)
    return missing is None, missing


def _lacking(functions: Functions) -> Reason | None:
    """What the installed torch_npu lacks."""
    package = importlib.import_module("torch_npu")
    absent = [name for name in functions if not hasattr(package, name)]
    if absent:
        return Reason("no-symbol", f"torch_npu{_version()} has no {', '.join(absent)}", "a newer torch_npu may")
    for name, wanted in functions.items():
        schemas = torch._C._jit_get_schemas_for_operator(f"npu::{name}")
        takes = {argument.name for schema in schemas for argument in schema.arguments}
        unknown = [parameter for parameter in wanted if parameter not in takes]
        if takes and unknown:  # without a schema there is nothing to see
            text = f"{name} of torch_npu{_version()} has no parameter {', '.join(unknown)}"
            return Reason("no-symbol", text, "a newer torch_npu may")
    return None


def _version() -> str:
    package = importlib.import_module("torch_npu")
    version = getattr(package, "__version__", None)
    return f" {version}" if version else ""


def npu_function(name: str) -> Any:
    """A function of torch_npu."""
    return getattr(importlib.import_module("torch_npu"), name)


def device_reason(site: Site) -> Reason | None:
    """Why a site is not for an NPU."""
    kind = site.device.type
    if kind == DEVICE:
        return None
    return elsewhere(site, f"torch_npu's functions run on {DEVICE}, not on {kind}")


def call_reason(*tensors: torch.Tensor | None, one_dtype: bool = True) -> str | None:
    """Why a call is not for torch_npu; None for the ordinary one, at the cost of a few attribute reads.

    Args:
        tensors: what the kernel reads; None ones, but for the first, are skipped.
        one_dtype: whether all must have the first one's dtype.
    """
    if is_compiling():
        return "inside a compiler, which can't see into torch_npu's functions"
    first = tensors[0]
    assert first is not None
    device, dtype = first.device, first.dtype
    if device.type != DEVICE:
        return "the tensors are not on an NPU"
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return "a tensor subclass"
        if tensor.device != device:
            return "the tensors are on different devices"
        if tensor.dtype not in DTYPES:
            return "the dtype is none of fp32, bf16, fp16"
        if one_dtype and tensor.dtype != dtype:
            return "the tensors have different dtypes"
    if first.numel() == 0:
        return "an empty tensor"
    return transformed()
