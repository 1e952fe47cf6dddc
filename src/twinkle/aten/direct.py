"""An operator by its own kernel without a registration: what ``<operator>_aten`` is."""

from __future__ import annotations

import functools
from typing import Any

import torch

from twinkle.aten.serving import Serving, interference
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import platform_of


@functools.lru_cache(maxsize=256)
def _serving_on(spec: OperatorSpec, device_type: str) -> Serving | None:
    platform = platform_of(device_type)
    return None if platform is None else Serving(spec, platform)


def call(spec: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator by its own kernel where that takes the call, else by PyTorch, which also refuses what it refuses."""
    if _is_a_call_of(spec.overload, args, kwargs):
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        device = torch.device(kwargs.get("device") or torch.get_default_device()) if tensor is None else tensor.device
        if tensor is None and any(argument.name == "device" for argument in spec.overload._schema.arguments):
            kwargs = {**kwargs, "device": device}  # the kernel doesn't see what is the default just now
        served = _serving_on(spec, device.type)
        if served is not None and interference(at_autograd=True) is None:
            values = served.arguments.of_declared_kinds(served.arguments.bind(args, kwargs))
            if served.refusal(values) is served.ungradable(values) is None:
                return served.run_with_gradient(values)
    return spec.native(*args, **kwargs)


def _is_a_call_of(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are such as the schema has: PyTorch's own reading of them, which a call makes too."""
    try:
        return torch._C._check_schema_allow_fake_script_object(overload._schema, *args, **kwargs)
    except Exception:  # whatever it raises there: the call itself has the right words
        return False
