"""Finding out what a live module computes, without touching it.

A class name or an attribute says little about the maths (``eps`` names a norm with and without ``1 + w``), so a
module's own ``forward`` is run on a stand-in: an object of its class with the same attributes, but with small random
CPU weights, no hooks, and no connection to the module. Its children are no live ones either: nobody's hook is run.

What fits must fit always, so a probe varies whatever a forward may look at: the number of dimensions, the size of the
numbers (a clamp), the values of all tensors (a scale that is one until it is trained), training and evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.reclass import BOUND_FORWARDS, CONTAINERS, peel
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

WIDTH = 24
"""The hidden size of stand-ins: a multiple of small group sizes, so that what works on groups of channels shows."""

OF_TORCH_AND_HOOKS = frozenset({*nn.Module().__dict__, *BOUND_FORWARDS, "_hf_hook"})
"""Attributes that every module has, or that others hang on it: a stand-in has none of the module's own."""

_FEW = 4096
"""Tensors of more than one dimension with more numbers than this keep their values: no weight of an op's."""


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU from a generator of their own; the process's random state is left alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers in fp32 whose rows range from thousandths to thousands, so that an eps and a clamp show."""
    sizes = torch.logspace(-3, 3, math.prod(shape[:-1]), device="cpu", dtype=torch.float32)
    return random_tensor(*shape, seed=seed) * sizes.view(*shape[:-1], 1)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No gradients, no autocast, CPU as the default device: whatever the caller's context is, a probe sees the same."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def stand_in(module: nn.Module, *, width: int = WIDTH, training: bool = True, **replaced: Any) -> Any:
    """An object of the module's class to run its ``forward`` on.

    Args:
        module: read, never changed; its weights may be on any device, even ``meta``.
        width: the size of its 1-D tensors.
        training: whether it is in training mode.
        replaced: attributes, parameters or children to put in the place of the module's own.

    Returns:
        the stand-in; its own floating-point tensors, but for large ones, are random CPU ones in fp32.
    """
    twin: Any = object.__new__(peel(type(module)))
    state = {name: value for name, value in module.__dict__.items() if name not in OF_TORCH_AND_HOOKS}
    containers = {name: dict(module.__dict__[name]) for name in CONTAINERS}
    containers["_modules"] = _unhooked_children(module)
    seed = 0
    for holder in (*containers.values(), state):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor):
                seed += 1
                holder[name] = _scrambled(value, width, seed)
    for name, value in replaced.items():
        holder = next((container for container in containers.values() if name in container), state)
        holder[name] = value
    twin.__dict__.update({**nn.Module().__dict__, "training": training, **state, **containers})
    call_plainly(twin)
    return twin


def call_plainly(twin: nn.Module) -> None:
    """Lets the children of a module of ours be called without the hooks that somebody has set for all modules."""
    for child in twin.modules():
        if child is not twin:
            # What nn.Module calls instead, without a look at hooks: the place of a compiled call.
            child.__dict__["_compiled_call_impl"] = child.forward


def _unhooked(module: nn.Module) -> Any:
    """A module of the same class, attributes and tensors that nobody's hook hangs on, nor a forward of its own."""
    twin: Any = object.__new__(peel(type(module)))
    state = {name: value for name, value in module.__dict__.items() if name not in OF_TORCH_AND_HOOKS}
    containers = {**{name: module.__dict__[name] for name in CONTAINERS}, "_modules": _unhooked_children(module)}
    twin.__dict__.update({**nn.Module().__dict__, "training": module.training, **state, **containers})
    return twin


def _unhooked_children(module: nn.Module) -> dict[str, Any]:
    return {name: None if child is None else _unhooked(child) for name, child in module._modules.items()}


def _scrambled(tensor: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    """Random numbers instead of a tensor's; with its own, a scale that happens to be one would pass for none."""
    shape = (width,) if len(shape_of(tensor)) == 1 else tuple(shape_of(tensor))
    if not tensor.is_floating_point() or (len(shape) > 1 and math.prod(shape) > _FEW):
        return tensor
    values = random_tensor(*shape, seed=seed)
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """A parameter's whole shape. DeepSpeed's ZeRO-3 keeps it in ``ds_shape``; the parameter itself is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def cast(twin: Any, dtype: torch.dtype) -> Any:
    """The same stand-in with its parameters in ``dtype``."""
    for name, parameter in twin._parameters.items():
        if parameter is not None:
            twin._parameters[name] = nn.Parameter(parameter.to(dtype), requires_grad=False)
    return twin


def fingerprint(module: nn.Module) -> Hashable:
    """What of a module can change what its ``forward`` computes, weights aside; equal for equal layers of one model.

    Objects are compared by identity, so a fingerprint is only good while the model is alive.
    """
    children = [(name, None if child is None else fingerprint(child)) for name, child in module._modules.items()]
    tensors = (*module._parameters.items(), *module._buffers.items())
    dimensions = [(name, None if tensor is None else len(shape_of(tensor))) for name, tensor in tensors]
    attributes = [
        (name, value if isinstance(value, (bool, int, float, str, type(None))) else id(value))
        for name, value in sorted(module.__dict__.items())
        if name not in OF_TORCH_AND_HOOKS
    ]
    return (peel(type(module)), *children, *dimensions, *attributes)


def named(site: Site) -> str:
    """A site in a reason: the same text for all instances of a class, so that their reasons add up."""
    return site.name if site.module is None else f"{site.owner.__qualname__}.{site.attribute}"


def probed(op: str) -> Callable[[Callable[[Site], Any]], Callable[[Site], Any]]:
    """Makes a probe total: whatever it raises is the reason that the op doesn't fit."""

    def decorate(probe: Callable[[Site], Any]) -> Callable[[Site], Any]:
        @functools.wraps(probe)
        def wrapper(site: Site) -> Any:
            try:
                with undisturbed():
                    return probe(site)
            except Exception as error:
                return Reason.of_error(error, "probe-failed", f"running {named(site)} on a small {op} input")

        return wrapper

    return decorate


def agree(result: Any, expected: torch.Tensor, mismatches: float = 0.0) -> bool:
    """Whether two results are the same up to the last bits.

    Args:
        result: what the module returned; anything that is no tensor of the expected shape and dtype disagrees.
        expected: what the reference returned; each of its rows is judged by its own largest number.
        mismatches: the share of elements that may differ by one rounding (bf16 and fp16 only).
    """
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype in (torch.bfloat16, torch.float16):
        return bool((result != expected).float().mean() <= mismatches) and torch.allclose(
            result.float(), expected.float(), rtol=1.6e-2, atol=1e-3
        )
    return bool(((result - expected).abs() <= 1e-5 * expected.abs().amax(-1, keepdim=True)).all())


def variant_of(reference: Any, site: Site, cache: dict[Hashable, Any]) -> Any:
    """What a site computes, in the terms of an op's reference module: its variant, or the Reason why it is none.

    Args:
        reference: the op's reference, or the Reason why it can't be had.
        cache: lives as long as the caller's walk over one model.
    """
    if isinstance(reference, Reason):
        return reference
    kind, wanted = ("function" if site.module is None else "method"), replaces(reference)
    if kind != wanted:
        return Reason("kind", f"{named(site)} is a {kind}, the op replaces a {wanted}")
    code = getattr(site.original, "__code__", None) or id(site.original)
    what = id(site.owner) if site.module is None else fingerprint(site.module)
    key = (id(reference), code, what)
    if key not in cache:
        cache[key] = _probe(reference, site)
    return cache[key]


def _probe(reference: Any, site: Site) -> Any:
    try:
        variant = reference.probe(site)
        hash(variant)  # sites of equal variants share a loaded kernel
    except Exception as error:
        return Reason.of_error(error, "probe-failed", f"probing {named(site)}")
    return variant


def replaces(reference: Any) -> str:
    """What an op's kernels take the place of: ``"method"`` of a module, or ``"function"``."""
    return getattr(reference, "REPLACES", "method")
