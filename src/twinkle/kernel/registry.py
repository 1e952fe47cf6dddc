"""What exists: ops, and for each op the backends that implement it.

Which of them is used for which part of a model is data in :mod:`twinkle.kernel.config`; targets are never registered
here. Importing this module imports neither torch nor any backend.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twinkle.reasons import Reason, did_you_mean

logger = logging.getLogger("twinkle.kernel")

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
        available: ``available()`` -> ``(True, None)`` or ``(False, reason)``, for this machine: device, package,
            version and symbols. An exception inside it counts as unavailable.
        accepts: ``accepts(site)`` -> None, or the reason why the kernel doesn't fit that very instance.
    """

    load: Callable[..., Any]
    available: Callable[[], tuple[bool, Reason | str | None]]
    accepts: Callable[[Any], Reason | str | None] | None = None

    def __post_init__(self) -> None:
        for name in ("load", "available", "accepts"):
            value = getattr(self, name)
            if not callable(value) and not (name == "accepts" and value is None):
                raise ValueError(f"KernelImpl({name}=…) must be callable, got {value!r}")


@dataclass
class OpDefinition:
    """One op: its backends, and the module that says what the op means.

    Attributes:
        name: the op's name, e.g. ``"rms_norm"``.
        implementations: backend key -> implementation.
        installer: installs the op's kernels instead of the default installer (``installer(model, target, impl)``).
        reference: dotted path (``module`` or ``module:attribute``) of the op's maths (see :mod:`twinkle.kernel.ops`);
            it tells what a site computes and serves the judge and the backends that exist for every op.
        scope: what the op's installer changes: functions of the whole ``process``, or the ``model`` alone.
        concerns: of an op with an installer, whether a module is one that its kernels would serve; without it every
            model may have one.
    """

    name: str
    implementations: dict[str, KernelImpl] = field(default_factory=dict)
    installer: Callable[..., int | None] | None = None
    reference: str | None = None
    scope: Literal["process", "model"] = "process"
    concerns: Callable[[Any], bool] | None = None

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
        object.__setattr__(self, "backends", _checked_chain(self.op, self.backends, f"KernelChoice(op={self.op!r})"))
        _check_installer(self.installer, f"KernelChoice(op={self.op!r})")


def _checked_chain(op: str, backends: Any, where: str) -> tuple[str, ...]:
    """The backends as a tuple; a bare string, an empty chain or anything else that is no chain is a ValueError."""
    problem = f"{where}: backends must be a non-empty tuple of names, got {backends!r}"
    if isinstance(backends, str) and backends:
        raise ValueError(f"{problem}; write backends=({backends!r},)")
    is_chain = isinstance(backends, Sequence) and backends and not isinstance(backends, str)
    if not is_chain or not all(isinstance(backend, str) and backend for backend in backends):
        raise ValueError(f"{problem}; registered for this op: {', '.join(backends_of(op)) or 'none'}")
    return tuple(backends)


def _check_installer(installer: Any, where: str) -> None:
    if installer is not None and not callable(installer):
        raise ValueError(f"{where}: installer must be callable as installer(model, target, impl), got {installer!r}")


_OPS: dict[str, OpDefinition] = {}
_EVERY_OP: dict[str, Callable[[OpDefinition], KernelImpl]] = {}


def register_op(
    name: str,
    *,
    implementations: Mapping[str, KernelImpl],
    installer: Callable[..., int | None] | None = None,
    reference: str | None = None,
    scope: Literal["process", "model"] = "process",
    concerns: Callable[[Any], bool] | None = None,
) -> OpDefinition:
    """Makes an op known.

    Args:
        name: what :class:`KernelChoice` calls it.
        implementations: backend key -> implementation; others may follow with :func:`register_backend`.
        installer, reference, scope, concerns: see :class:`OpDefinition`.

    Raises:
        ValueError: the name exists already, or an argument is of the wrong kind; nothing was registered.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"an op's name must be a non-empty string, got {name!r}")
    _check_installer(installer, f"op {name!r}")
    if not isinstance(implementations, Mapping):
        raise ValueError(f"op {name!r}: implementations must map backend names to KernelImpl, got {implementations!r}")
    if name in _OPS:
        raise ValueError(f"op {name!r} is already registered; add a backend to it with register_backend({name!r}, …)")
    definition = OpDefinition(name, {}, installer, reference, scope, concerns)
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
    if not isinstance(backend, str) or not backend:
        raise ValueError(f"op {op!r}: a backend's name must be a non-empty string, got {backend!r}")
    if not isinstance(impl, KernelImpl):
        raise ValueError(f"op {op!r}, backend {backend!r}: expected a KernelImpl, got {impl!r}")


def get_op(name: str) -> OpDefinition:
    """The op of that name; the built-in ops are registered first, third-party ones are looked for before giving up.

    Raises:
        ValueError: unknown op; the message lists the known ones and the nearest.
    """
    if not isinstance(name, str):
        raise ValueError(f"an op is named by a string, got {name!r}")
    if name not in _OPS:
        importlib.import_module("twinkle.kernel.ops")
    if name not in _OPS:
        _load_plugins()
    if name not in _OPS:
        _load_plugins(refresh=True)  # what brings it may have been installed since
    if name not in _OPS:
        text = f"unknown op {name!r}; known: {', '.join(sorted(_OPS))}{did_you_mean(name, _OPS)}"
        raise ValueError("; ".join([text, *map(str, broken_plugins())]))
    return _OPS[name]


def ops() -> dict[str, OpDefinition]:
    """All known ops by name, third-party ones included."""
    importlib.import_module("twinkle.kernel.ops")
    _load_plugins()
    return dict(sorted(_OPS.items()))


def _load_plugins(refresh: bool = False) -> dict[tuple[str, str], Reason]:
    from twinkle.kernel.plugins import load_plugins

    return load_plugins(refresh)


def broken_plugins() -> tuple[Reason, ...]:
    """Why packages of others that would bring ops or backends couldn't be loaded."""
    return tuple(_load_plugins().values())


def reference_of(op: str) -> Any:
    """An op's reference; None when it has none, or the Reason why it can't be imported."""
    try:
        return get_op(op).load_reference()
    except Exception as error:
        return Reason.of_error(error, "broken-reference", f"importing the reference of op {op}")


def backends_of(op: str) -> tuple[str, ...]:
    """The backends that are registered for an op, third-party ones included, the derived ones last."""
    own = get_op(op).implementations
    _load_plugins()
    return (*own, *(name for name in _EVERY_OP if name not in own))


def get_impl(op: str, backend: str) -> KernelImpl | Reason:
    """The implementation of a backend, or the reason why there is none; plug-ins are looked for before saying so."""
    definition = get_op(op)
    if backend not in definition.implementations:
        _load_plugins()
    if backend in definition.implementations:
        return definition.implementations[backend]
    if backend in _EVERY_OP:
        return _EVERY_OP[backend](definition)
    registered = backends_of(op) if definition.reference else tuple(definition.implementations)
    known = {*registered, *KNOWN_BACKENDS}
    close = "" if backend in known else did_you_mean(backend, known).removeprefix("; ")
    others = f"registered: {', '.join(registered)}" if registered else None
    text = f"backend {backend} is not registered for op {op}"
    broken = () if backend in known else broken_plugins()  # it may be what one of them would have brought
    return Reason("not-registered", "; ".join([text, *map(str, broken)]), close or others)


class lazy_import:
    """``lazy_import("package.module:attribute")``: a callable that imports the attribute at its first call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def resolve(self) -> Callable[..., Any]:
        module, _, attribute = self.path.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolve()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"lazy_import({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, lazy_import) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


def availability(impl: KernelImpl) -> Reason | None:
    """None when the backend can be used on this machine, else the reason; never raises."""
    try:
        answer = impl.available()
    except Exception as error:
        return Reason.of_error(error, "not-available", "available()")
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], bool):
        return Reason("not-available", f"available() returned {answer!r:.80}, not (True, None) or (False, reason)")
    usable, reason = answer
    return None if usable else Reason.of(reason or "available() said no, without a reason", "not-available")


class AskedOnce:
    """The answers of one call: each backend is asked once, however many targets name it."""

    def __init__(self) -> None:
        self._impls: dict[tuple[str, str], KernelImpl | Reason] = {}
        # Ops share an available() function. Keyed by identity, since it may be unhashable; _impls keeps it alive.
        self._answers: dict[Any, Reason | None] = {}

    def impl_of(self, op: str, backend: str) -> KernelImpl | Reason:
        """The implementation, or why there is none or it can't be used on this machine."""
        if (op, backend) not in self._impls:
            self._impls[op, backend] = get_impl(op, backend)
        impl = self._impls[op, backend]
        if isinstance(impl, Reason):
            return impl
        asked = impl.available if isinstance(impl.available, lazy_import) else id(impl.available)
        if asked not in self._answers:
            self._answers[asked] = availability(impl)
        return self._answers[asked] or impl


def refusal(impl: KernelImpl, site: Any) -> Reason | None:
    """Why a candidate doesn't fit a site, as far as that shows before loading it."""
    if impl.accepts is None:
        return None
    try:
        answer = impl.accepts(site)
    except Exception as error:
        return Reason.of_error(error, "accepts-failed", "accepts()")
    if answer is None or isinstance(answer, (Reason, str)):
        return None if answer is None else Reason.of(answer, "refused")
    return Reason("accepts-failed", f"accepts() returned {answer!r:.80}, not None or a reason")


def load_impl(impl: KernelImpl, target: Any, site: Any) -> Any:
    """The loaded implementation, or a Reason when loading raised."""
    try:
        load = impl.load.resolve() if isinstance(impl.load, lazy_import) else impl.load
        loaded = load(target, site) if _takes_site(load) else load(target)
    except Exception as error:
        return Reason.of_error(error, "load-failed", "load()")
    return Reason("load-failed", "load() returned None") if loaded is None else loaded


def _takes_site(load: Callable[..., Any]) -> bool:
    """Whether ``load`` wants the site; a further parameter with a default is its own business, unless named so."""
    try:
        parameters = list(inspect.signature(load).parameters.values())
    except (TypeError, ValueError):  # no signature to read, e.g. a builtin
        return False
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return True
    second = parameters[1] if len(parameters) > 1 else None
    if second is None or second.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        return False
    return second.default is second.empty or second.name == "site"


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

    Raises:
        ValueError: the op is unknown, or ``backends`` is a string or empty.
    """
    level = logging.WARNING if warn else logging.DEBUG
    asked = AskedOnce()
    for backend in _checked_chain(op, backends, f"resolve_impl({op!r})"):
        impl = asked.impl_of(op, backend)
        loaded = impl if isinstance(impl, Reason) else load_impl(impl, target, None)
        if not isinstance(loaded, Reason):
            return loaded, backend
        logger.log(level, "%s: %s: %s", op, backend, loaded)
    return None, None
