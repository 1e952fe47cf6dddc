"""What exists: ops, and for each op the backends that implement it.

Which of them is used for which part of a model is data in :mod:`twinkle.kernel.config`; targets are never registered
here. Importing this module imports neither torch nor any backend.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.reasons import Reason, did_you_mean

logger = logging.getLogger("twinkle.kernel")

ENTRY_POINT_GROUP = "twinkle.kernel_ops"

KNOWN_BACKENDS = ("npu", "triton", "liger", "torch", "inductor", "fla")
"""Backends that a chain may name although no implementation of the op is registered (yet, or on this machine)."""


@dataclass(frozen=True)
class KernelImpl:
    """One backend of one op.

    Args:
        load: ``load(target)`` or ``load(target, site)`` -> the implementation. For an op that replaces a method it is a
            layer class: an ``nn.Module`` subclass without an ``__init__`` of its own, whose ``forward`` takes the
            original's arguments. For an op that replaces a function it is a function with the original's signature.
            Either may carry ``accepts_call(*same arguments) -> str | None``: a reason sends that one call to the
            original. Called once per distinct variant of a target's sites.
        available: ``available()`` -> ``(True, None)`` or ``(False, reason)``, for this machine: device, package, version
            and symbols. An exception inside it counts as unavailable.
        accepts: ``accepts(site)`` -> None, or the reason why the kernel doesn't fit that very instance.
    """

    load: Callable[..., Any]
    available: Callable[[], tuple[bool, Reason | str | None]]
    accepts: Callable[[Any], Reason | str | None] | None = None


@dataclass
class OpDefinition:
    """One op: its backends, and the module that says what the op means.

    Attributes:
        name: the op's name, e.g. ``"rms_norm"``.
        implementations: backend key -> implementation.
        installer: installs the op's kernels instead of the default installer (``installer(model, target, impl)``).
        reference: dotted path (``module`` or ``module:attribute``) of the op's maths (see :mod:`twinkle.kernel.ops`); it
            tells what a site computes and serves the judge and the backends that exist for every op.
    """

    name: str
    implementations: dict[str, KernelImpl] = field(default_factory=dict)
    installer: Callable[..., int | None] | None = None
    reference: str | None = None

    def load_reference(self) -> Any:
        """What says what the op means, imported on first use; None when the op has no reference."""
        if self.reference is None:
            return None
        module, _, attribute = self.reference.partition(":")
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


@dataclass(frozen=True)
class KernelChoice:
    """Which op replaces a target, and which backends to try, best first.

    Args:
        op: a registered op.
        backends: a non-empty tuple of backend keys.
        installer: installs this entry instead of the op's or the default installer.

    Raises:
        ValueError: unknown op (the message lists the known ones and the nearest), or ``backends`` is a string or empty.
    """

    op: str
    backends: tuple[str, ...]
    installer: Callable[..., int | None] | None = None

    def __post_init__(self) -> None:
        get_op(self.op)
        if isinstance(self.backends, str) or not isinstance(self.backends, Sequence):
            raise ValueError(
                f"KernelChoice(op={self.op!r}): backends must be a tuple of names, got {self.backends!r}; "
                f"write backends=({str(self.backends)!r},)"
            )
        if not self.backends or not all(isinstance(backend, str) and backend for backend in self.backends):
            raise ValueError(
                f"KernelChoice(op={self.op!r}): backends must be a non-empty tuple of names, got {self.backends!r}; "
                f"registered for this op: {', '.join(backends_of(self.op)) or 'none'}"
            )
        if self.installer is not None and not callable(self.installer):
            raise ValueError(f"KernelChoice(op={self.op!r}): installer must be callable, got {self.installer!r}")
        object.__setattr__(self, "backends", tuple(self.backends))


_OPS: dict[str, OpDefinition] = {}
_EVERY_OP: dict[str, Callable[[OpDefinition], KernelImpl]] = {}
_plugin_errors: dict[str, Reason] | None = None


def register_op(
    name: str,
    *,
    implementations: dict[str, KernelImpl],
    installer: Callable[..., int | None] | None = None,
    reference: str | None = None,
) -> OpDefinition:
    """Makes an op known. An existing name is a ValueError."""
    if name in _OPS:
        raise ValueError(f"op {name!r} is already registered; add a backend to it with register_backend({name!r}, …)")
    definition = OpDefinition(name, {}, installer, reference)
    for backend, impl in implementations.items():
        _check_impl(name, backend, impl)
        definition.implementations[backend] = impl
    _OPS[name] = definition
    return definition


def register_backend(op: str, backend: str, impl: KernelImpl) -> None:
    """Adds a backend to an op: what a vendor's wheel calls.

    Raises:
        ValueError: the op is unknown, or already has that backend.
    """
    definition = get_op(op)
    _check_impl(op, backend, impl)
    if backend in definition.implementations:
        raise ValueError(f"op {op!r} already has a backend {backend!r}; register yours under a name of its own")
    definition.implementations[backend] = impl


def register_backend_for_every_op(backend: str, factory: Callable[[OpDefinition], KernelImpl]) -> None:
    """Adds a backend that is derived from an op instead of written for it, e.g. from its reference."""
    _EVERY_OP[backend] = factory


def unregister_backend_for_every_op(backend: str) -> None:
    """Takes back :func:`register_backend_for_every_op`."""
    _EVERY_OP.pop(backend, None)


def _check_impl(op: str, backend: str, impl: KernelImpl) -> None:
    if not isinstance(impl, KernelImpl):
        raise ValueError(f"op {op!r}, backend {backend!r}: expected a KernelImpl, got {impl!r}")


def get_op(name: str) -> OpDefinition:
    """The op of that name; the built-in ops are registered first, third-party ones are looked for before giving up.

    Raises:
        ValueError: unknown op; the message lists the known ones and the nearest.
    """
    if name not in _OPS:
        importlib.import_module("twinkle.kernel.ops")
    if name not in _OPS:
        load_plugins()
    if name not in _OPS:
        raise ValueError(f"unknown op {name!r}; known: {', '.join(sorted(_OPS))}{did_you_mean(str(name), _OPS)}")
    return _OPS[name]


def ops() -> dict[str, OpDefinition]:
    """All known ops by name, third-party ones included."""
    importlib.import_module("twinkle.kernel.ops")
    load_plugins()
    return dict(sorted(_OPS.items()))


def backends_of(op: str) -> tuple[str, ...]:
    """The backends that are registered for an op, the derived ones last."""
    return (*get_op(op).implementations, *(name for name in _EVERY_OP if name not in get_op(op).implementations))


def get_impl(op: str, backend: str) -> KernelImpl | Reason:
    """The implementation of a backend, or the reason why there is none."""
    definition = get_op(op)
    if backend in definition.implementations:
        return definition.implementations[backend]
    if backend in _EVERY_OP:
        return _EVERY_OP[backend](definition)
    known = {*backends_of(op), *KNOWN_BACKENDS}
    hint = None if backend in known else did_you_mean(backend, known).removeprefix("; ") or None
    return Reason("not-registered", f"backend {backend} is not registered for op {op}", hint)


def load_plugins(refresh: bool = False) -> dict[str, Reason]:
    """Scans the entry points of ``twinkle.kernel_ops`` (once, unless ``refresh``) and calls what they name.

    An entry point names a function without arguments that registers ops or backends. A broken one is kept out.

    Returns:
        the ones that could not be loaded, by name, with the reason.
    """
    global _plugin_errors
    if _plugin_errors is None or refresh:
        from importlib.metadata import entry_points

        already_loaded = _loaded_plugins
        _plugin_errors = {}
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            if (entry.name, entry.value) in already_loaded:
                continue
            try:
                register = entry.load()
                register()
                already_loaded.add((entry.name, entry.value))
            except Exception as error:  # somebody else's package must not take us down
                _plugin_errors[entry.name] = Reason.of_error(error, "broken-plugin", f"plug-in {entry.name}")
                logger.warning("%s (entry point %s = %s)", _plugin_errors[entry.name], entry.name, entry.value)
    return dict(_plugin_errors)


_loaded_plugins: set[tuple[str, str]] = set()


class lazy_import:  # noqa: N801 - used like a function
    """``lazy_import("package.module:attribute")``: a callable that imports the attribute at its first call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def resolve(self) -> Callable[..., Any]:
        module, _, attribute = self.path.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolve()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"lazy_import({self.path!r})"


def availability(impl: KernelImpl) -> Reason | None:
    """None when the backend can be used on this machine, else the reason; never raises."""
    try:
        answer = impl.available()
        usable, reason = answer
    except Exception as error:
        return Reason.of_error(error, "not-available", "available()")
    return None if usable else Reason.of(reason or "available() said no, without a reason", "not-available")


def load_impl(impl: KernelImpl, target: Any, site: Any) -> Any:
    """The loaded implementation, or a Reason when loading raised."""
    try:
        load = impl.load.resolve() if isinstance(impl.load, lazy_import) else impl.load
        loaded = load(target, site) if _takes_site(load) else load(target)
    except Exception as error:
        return Reason.of_error(error, "load-failed", "load()")
    return Reason("load-failed", "load() returned None") if loaded is None else loaded


def _takes_site(load: Callable[..., Any]) -> bool:
    try:
        inspect.signature(load).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # no signature to read, e.g. a builtin
        return False
    return True


def walk_chain(op: str, backends: Sequence[str]) -> Iterator[tuple[str, KernelImpl | Reason]]:
    """The chain, lazily: each backend with its implementation, or with the reason why it is out on this machine."""
    for backend in backends:
        impl = get_impl(op, backend)
        if not isinstance(impl, Reason):
            missing = availability(impl)
            yield backend, impl if missing is None else missing
        else:
            yield backend, impl


def resolve_impl(
    op: str, backends: Sequence[str], warn: bool = False, target: Any = None
) -> tuple[Any, str] | tuple[None, None]:
    """The first backend of the chain that is registered, available and loads.

    Args:
        op: a registered op.
        backends: backend keys, best first; later ones are not probed once one has loaded.
        warn: log skipped backends as WARNING instead of DEBUG.
        target: handed to ``load``.

    Returns:
        ``(implementation, backend)``, or ``(None, None)`` when none could be had.
    """
    level = logging.WARNING if warn else logging.DEBUG
    for backend, impl in walk_chain(op, backends):
        loaded = impl if isinstance(impl, Reason) else load_impl(impl, target, None)
        if not isinstance(loaded, Reason):
            return loaded, backend
        logger.log(level, "%s: %s: %s", op, backend, loaded)
    return None, None
