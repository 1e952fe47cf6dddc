"""PyTorch's grouped matrix product: where it is, what it can read, and the experts' products by it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from twinkle.kernel.ops.moe.experts_reference import MoeExpertsVariant
from twinkle.kernel.ops.moe.routing import Route


@functools.cache
def has_grouped_mm(device: torch.device) -> bool:
    """Whether PyTorch multiplies groups of rows in one call there: on CPUs, and NVIDIA GPUs from Ampere on."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu"


def whole_16_bytes(*stacks: torch.Tensor) -> bool:
    """Whether rows and columns of stacks ``[E, outer, inner]`` lie as it reads and writes them: 16 bytes at a time."""
    for stack in stacks:
        unit = 16 // stack.element_size()
        begins = is_compiling() or stack.data_ptr() % 16 == 0  # a compiler can't know
        if not begins or stack.stride(2) != 1 or any(n % unit for n in (*stack.shape[1:], *stack.stride()[:2])):
            return False
    return True


def inwards(stack: torch.Tensor, variant: MoeExpertsVariant) -> torch.Tensor:
    """A stack as ``[E, inputs, outputs]``."""
    return stack if variant.transposed else stack.transpose(1, 2)


def stack_gradient(outputs: torch.Tensor, inputs: torch.Tensor, to: Route, variant: MoeExpertsVariant) -> torch.Tensor:
    """A stack's gradient from the gradient of what it puts out and what it was given, a row for each sorted slot."""
    a, b = (inputs, outputs) if variant.transposed else (outputs, inputs)
    return F.grouped_mm(a.t(), b, offs=to.ends)
