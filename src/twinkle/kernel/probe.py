"""Finding out what a live module computes, without touching it.

A class name or an attribute says little about the maths (``eps`` names a norm with and without ``1 + w``), so a
module's own ``forward`` is run on a stand-in: an object of its class with the same attributes, but with small random
CPU weights, no hooks, and no connection to the module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.reclass import BOUND_FORWARDS, peel
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

WIDTH = 8
"""The hidden size of stand-ins: enough for every norm, MLP and expert to differ from its neighbours."""

_CONTAINERS = ("_parameters", "_buffers", "_modules")


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU from a generator of their own; the process's random state is left alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No gradients, no autocast, CPU as the default device: whatever the caller's context is, a probe sees the same."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def stand_in(module: nn.Module, *, width: int = WIDTH, **replaced: Any) -> Any:
    """An object of the module's class to run its ``forward`` on.

    Args:
        module: read, never changed; its weights may be on any device, even ``meta``.
        width: the size of its 1-D parameters.
        replaced: attributes, parameters or children to put in the place of the module's own.

    Returns:
        the stand-in; its 1-D parameters are random CPU ones in fp32.
    """
    twin: Any = object.__new__(peel(type(module)))
    empty_hooks = nn.Module().__dict__
    left_out = {*empty_hooks, *BOUND_FORWARDS, "_hf_hook"}
    state = {name: value for name, value in module.__dict__.items() if name not in left_out}
    containers = {name: dict(module.__dict__[name]) for name in _CONTAINERS}
    for index, (name, parameter) in enumerate(containers["_parameters"].items()):
        if parameter is not None and len(shape_of(parameter)) == 1:
            containers["_parameters"][name] = nn.Parameter(random_tensor(width, seed=index + 1), requires_grad=False)
    for name, value in replaced.items():
        holder = next((container for container in containers.values() if name in container), state)
        holder[name] = value
    twin.__dict__.update({**empty_hooks, "training": module.training, **state, **containers})
    return twin


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
    attributes: list[tuple[str, Hashable]] = []
    for name, value in sorted(module.__dict__.items()):
        if name == "_modules":
            attributes.append((name, tuple((k, None if v is None else fingerprint(v)) for k, v in value.items())))
        elif name in ("_parameters", "_buffers"):
            attributes.append((name, tuple((k, None if v is None else len(shape_of(v))) for k, v in value.items())))
        elif not name.startswith("_") or isinstance(value, (bool, int, float, str)):
            attributes.append((name, value if isinstance(value, (bool, int, float, str, type(None))) else id(value)))
    return (peel(type(module)), tuple(attributes))


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
        expected: what the reference returned.
        mismatches: the share of elements that may differ by one rounding (bf16 and fp16 only).
    """
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype in (torch.bfloat16, torch.float16):
        return bool((result != expected).float().mean() <= mismatches) and torch.allclose(
            result.float(), expected.float(), rtol=1.6e-2, atol=1e-3
        )
    return torch.allclose(result, expected, rtol=1e-5, atol=1e-6)


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
