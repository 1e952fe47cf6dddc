"""Dispatch keys: which platform a registration means, and at which keys an operator's calls can be had there."""

from __future__ import annotations

import torch

from twinkle.aten.errors import RegistrationError
from twinkle.platforms import PLATFORMS, Platform, get_platform
from twinkle.reasons import nearest

DEFAULT_KEY = "AutogradPrivateUse1"

REFUSED = {
    "Autograd": "it stands for the autograd keys of all backends, so that every device of the process would be reached",
    "Meta": "meta tensors have no data; PyTorch's own shape rules serve them",
    "CompositeImplicitAutograd": "it is not one backend's key but what every backend without a kernel falls back to",
    "CompositeExplicitAutograd": "it is not one backend's key but what every backend without a kernel falls back to",
    "CompositeExplicitAutogradNonFunctional": "it is not one backend's key but what others fall back to",
    "BackendSelect": "calls on every device pass through it",
}


def platforms_meant(operator: str, dispatch_key: str, platform: str | None) -> list[Platform]:
    """The platforms that a key, or a name, or both can mean, here or not; at least one.

    A key is a role: the canonical (autograd) or the compatible (backend) key of a platform. Which keys are installed
    depends on the operator, see :func:`effective_keys`. The default can't be told from one that was passed, so it
    agrees with every platform.

    Raises:
        RegistrationError: unknown name or key, or a key that belongs to another platform or to none.
    """
    for what, value in (("key", dispatch_key), ("platform's name", "" if platform is None else platform)):
        if not isinstance(value, str):
            raise RegistrationError.of(operator, "bad-argument", f"a {what} is a string, not {value!r}")
    if platform is not None:
        return [_named(operator, dispatch_key, platform)]
    _check_known(operator, dispatch_key)
    return [p for p in PLATFORMS.values() if dispatch_key in (p.dispatch_key, p.autograd_key)]


def platform_here(operator: str, dispatch_key: str, candidates: list[Platform]) -> Platform:
    """The one of them that this machine has.

    Raises:
        RegistrationError: it has none of them, or several.
    """
    missing = {p.name: p.missing() for p in candidates}
    here = [p for p in candidates if missing[p.name] is None]
    if len(here) == 1:
        return here[0]
    if here:
        names = " and ".join(p.name for p in here)
        text = f"key {dispatch_key} stands for {names} here"
        raise RegistrationError.of(operator, "ambiguous-key", text, "say which: platform=…")
    if len(candidates) == 1:
        (only,) = candidates
        text = f"no {only.name} ({only.device_type}) on this machine: {missing[only.name]}"
        raise RegistrationError.of(operator, "no-device", text)
    looked_for = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    hint = "on this machine: platform='cpu'" if dispatch_key == DEFAULT_KEY else None
    text = f"no device of the key {dispatch_key} on this machine: {looked_for}"
    raise RegistrationError.of(operator, "no-device", text, hint)


def _named(operator: str, dispatch_key: str, name: str) -> Platform:
    try:
        platform = get_platform(name)
    except ValueError as error:
        hint = f"that is a key: dispatch_key={name!r}" if name in _known() else None
        raise RegistrationError.of(operator, "unknown-platform", str(error), hint) from None
    _check_known(operator, dispatch_key)
    accepted = (platform.autograd_key, platform.dispatch_key)
    if dispatch_key not in (*accepted, DEFAULT_KEY):
        text = f"key {dispatch_key} is not one of platform {platform.name}, whose keys are {' and '.join(accepted)}"
        raise RegistrationError.of(operator, "foreign-key", text)
    return platform


def _known() -> list[str]:
    return list(dict.fromkeys(key for p in PLATFORMS.values() for key in (p.autograd_key, p.dispatch_key)))


def _check_known(operator: str, dispatch_key: str) -> None:
    if dispatch_key in REFUSED:
        raise RegistrationError.of(operator, "refused-key", f"key {dispatch_key} is refused: {REFUSED[dispatch_key]}")
    known = _known()
    if dispatch_key not in known:
        names = [name for p in PLATFORMS.values() for name in (p.name, *p.aliases)]
        meant = nearest(dispatch_key, [*known, *names])
        close = f"; did you mean {meant!r}?" if meant in known else ""
        hint = f"a platform goes by its name: platform={meant!r}" if meant in names else None
        text = f"unknown key {dispatch_key!r}; known: {', '.join(known)}{close}"
        raise RegistrationError.of(operator, "unknown-key", text, hint)


def effective_keys(overload: torch._ops.OpOverload, platform: Platform) -> tuple[str, ...]:
    """Where a kernel must be installed to be reached by every call, the autograd key first.

    - An operator without tensor arguments (a factory) is dispatched below autograd: the backend key.
    - One with a derivative of PyTorch's own: the backend key, so that the derivative stays above the kernel.
    - A composite one has no derivative of its own, and at the backend key alone loses its gradient: the autograd key;
      and the backend key for calls that come from below autograd, as all do in inference mode.
    - A composite one with an autograd kernel beside (``linear``): the autograd key only. With a kernel at the backend
      key PyTorch would take a backward operator that CPU and out-of-tree devices lack.
    - Where a platform's autograd layer doesn't go on to its backend key: both, for all others that take tensors.
    """
    if not any("Tensor" in str(argument.type) for argument in overload._schema.arguments):
        return (platform.dispatch_key,)
    if _has_kernel(overload, "CompositeImplicitAutograd"):
        both = not _has_kernel(overload, "Autograd")
        return (platform.autograd_key, platform.dispatch_key) if both else (platform.autograd_key,)
    both = "autograd_skips_backend" in platform.quirks
    return (platform.autograd_key, platform.dispatch_key) if both else (platform.dispatch_key,)


def is_dispatched(overload: torch._ops.OpOverload) -> bool:
    """Whether the dispatcher knows an overload: some exist in TorchScript only, and it raises when asked about them."""
    return torch._C._dispatch_has_kernel(overload.name())


def _has_kernel(overload: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
