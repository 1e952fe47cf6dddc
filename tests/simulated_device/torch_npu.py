"""A stand-in for the package ``torch_npu`` on the simulated NPU: the published functions, of which some are computed.

Every operator of the published wheel is defined by its schema, so a call with a wrong name, order, type or number of
arguments fails as it would on the chip. Those of :data:`FUNCTIONS` compute, on the CPU; a call of any other
raises NotImplementedError. None is differentiable: the wheel publishes backward operators, but not which forward calls
them, so a gradient that isn't made of published calls would be proved by nothing.
"""

from __future__ import annotations

import importlib.machinery
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.simulated_device import cann, cann_attention

VERSION = "2.14.0"
SCHEMAS = Path(__file__).with_name(f"torch_npu_{VERSION}.txt")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **cann.FUNCTIONS,
    "npu_fusion_attention": cann_attention.fusion_attention,
    "npu_fusion_attention_grad": cann_attention.fusion_attention_grad,
    "npu_chunk_gated_delta_rule": cann_attention.chunk_gated_delta_rule,
}
"""Operator -> what it computes; takes tensors on the device, returns some on the CPU."""

calls: Counter[str] = Counter()
"""How often each operator was called."""

_library: list[torch.library.Library] = []


def make() -> types.ModuleType:
    """The module to put in the place of ``torch_npu``; once per process."""
    library = torch.library.Library("npu", "DEF")
    _library.append(library)  # what it defines is there as long as it is
    names = []
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines()[1:]:
        library.define(line)
        names.append(line.partition("(")[0])
    for name, function in FUNCTIONS.items():
        library.impl(name, _computed(name, function), "PrivateUse1")
        library.impl(name, _without_gradient(name), "AutogradPrivateUse1")
    module = types.ModuleType("torch_npu", "Stands in for the vendor's plug-in.")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.__version__ = VERSION  # type: ignore[attr-defined]
    for name in dict.fromkeys(name.partition(".")[0] for name in names):
        setattr(module, name, getattr(torch.ops.npu, name))
    return module


def _computed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        results = function(*args, **kwargs)
        return tree_map(lambda value: value.to("npu") if isinstance(value, torch.Tensor) else value, results)

    return kernel


def _without_gradient(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise AssertionError(f"{name} is called where gradients are recorded, of which it has none here")
        packet, _, overload = name.partition(".")
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(torch.ops.npu, packet), overload or "default")(*args, **kwargs)

    return kernel
