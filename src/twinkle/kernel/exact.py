"""A whole model in fp64: what originals and kernels are both measured against."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from twinkle.kernel.journal import lock

_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
_NAMED_CASTS = dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double)
_LIKE_ANOTHER = (torch.Tensor.to, torch.Tensor.type_as)
_BITS = (torch.Tensor.view,)  # with a dtype it gives the same bits another meaning


class KeepFloat64(TorchFunctionMode):
    """While it is active, who asks for a narrower floating-point dtype gets fp64.

    A model that was cast to fp64 is not computed in fp64: its norms, routers and losses ask for fp32 by name, with
    ``x.float()``, ``x.to(torch.float32)``, ``x.to(another)``, ``x.type_as(another)`` or ``softmax(x, dtype=…)``. All of
    that is answered in fp64, for integers too, so that what meets afterwards has one dtype. What an operator does
    inside itself is out of reach.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BITS:
            return func(*args, **kwargs)
        func = _NAMED_CASTS.get(func, func)
        if func in _LIKE_ANOTHER:
            args = (args[0], *(_wide_twin(value) for value in args[1:]))
            kwargs = {name: _wide_twin(value) for name, value in kwargs.items()}
        return func(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _wide_twin(value: Any) -> Any:
    """For a tensor that another is to become like: an empty one in fp64 on the same device, where it is narrower."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return value
    return torch.empty(0, dtype=_WIDE[value.dtype], device=value.device)


def exact_copy(model: nn.Module) -> nn.Module:
    """A copy of a model in fp64, to be run within :func:`exactly`; experts as a loop, grouped products have none.

    Args:
        model: left as it is.
    """
    exact = copy.deepcopy(model).double()
    if hasattr(getattr(exact, "config", None), "_experts_implementation"):
        exact.set_experts_implementation("eager")  # type: ignore[operator]
    return exact


def exact_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's keyword arguments with every floating-point tensor in fp64."""
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}


@contextlib.contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """Within it an :func:`exact_copy` of the model computes in fp64."""
    with by_pytorch_alone(model), KeepFloat64():
        yield


@contextlib.contextmanager
def by_pytorch_alone(model: nn.Module) -> Iterator[None]:
    """Within it, and for all threads, transformers' functions are what it wrote itself.

    In the files of the model's classes, that is, and of those that they inherit from.

    Where flash-linear-attention, causal-conv1d or mamba-ssm are installed it calls their kernels instead, which know no
    fp64 and no transforms.
    """
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    homes = [sys.modules[name] for name in names if name in sys.modules]
    with lock, contextlib.ExitStack() as restored:
        for home in homes:
            for name, value in list(vars(home).items()):
                own = _written_in_pytorch(value)
                if own is not None:
                    restored.callback(setattr, home, name, value)
                    setattr(home, name, own)
        yield


def _written_in_pytorch(value: Any) -> Callable[..., Any] | None:
    """Of what transformers' ``use_kernel_func_from_hub_with_fallback`` made of a function: the function."""
    if isinstance(value, nn.Module):  # that is what the package kernels makes of it
        value = _closed_over(getattr(type(value), "forward", None), "func")
    own = _closed_over(value, "torch_function")
    if own is None:
        return None
    known = inspect.signature(own).parameters
    return lambda *args, **kwargs: own(*args, **{name: given for name, given in kwargs.items() if name in known})


def _closed_over(function: Any, name: str) -> Any:
    """A function's variable of a function around it; None where it has none of that name."""
    if not inspect.isfunction(function) or function.__closure__ is None or name not in function.__code__.co_freevars:
        return None
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
