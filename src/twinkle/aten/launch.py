"""Launching Triton programs: on the tensors' device, and with the interpreter's own doings set apart."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from twinkle.aten.router import quietly

_DTYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


def reinterpret(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """The tensor's memory as integers of the same width, for a program; PyTorch sees no view."""
    return triton.reinterpret(tensor, _DTYPES[dtype])


def launch(kernel: Any, device: torch.device, programs: int, *arguments: Any, **constants: Any) -> None:
    """Runs ``programs`` programs of a ``@triton.jit`` function.

    Args:
        device: that of the tensors among the arguments. A launch while another device is the current one would read
            foreign memory.
    """
    if triton.knobs.runtime.interpret:
        with quietly():
            kernel[(programs,)](*arguments, **constants)
        return
    several = torch.get_device_module(device).device_count() > 1
    with torch.get_device_module(device).device(device) if several else contextlib.nullcontext():
        kernel[(programs,)](*arguments, **constants)
