"""How a method of one live module is replaced: the module gets a generated subclass of its class.

Nothing process-wide changes: two models of one class may differ, ``isinstance`` and ``__name__`` hold, and the
module's parameters, buffers, hooks and attributes stay as they are. What was installed is written on the generated
class, so a copy of the module knows it too. Pickles name the original class; a loaded model is the original.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

    from twinkle.kernel.undo import Journal, Row

_MARK = "_twinkle_installed"

BOUND_FORWARDS = ("forward", "_old_forward")
"""Instance attributes in which other tools keep a bound ``forward``: HF kernels (its fallback) and accelerate's hooks."""


@dataclass(frozen=True, eq=False)
class Method:
    """One replaced method.

    Attributes:
        function: what is installed.
        original: what it replaced.
        row: the report row that counts it.
        base: the user's own subclass of the module's class, when that is what the method comes from.
    """

    function: Callable[..., Any]
    original: Callable[..., Any]
    row: Row
    base: type | None = None


@dataclass(frozen=True, eq=False)
class Installed:
    """What a generated class carries.

    Attributes:
        origin: the class that the module had before, wrappers of torch included; undo assigns exactly this object.
        base: what the generated class derives from: the class without wrappers, or the user's own subclass of it.
        methods: attribute -> replaced method.
        journal: the journal of the call that installed it.
    """

    origin: type
    base: type
    methods: dict[str, Method]
    journal: Journal


def installed_on(cls: type) -> Installed | None:
    """What is installed on instances of ``cls``, seen through wrappers that torch put around the generated class."""
    owner = _generated(cls)
    return None if owner is None else owner.__dict__[_MARK]


def _generated(cls: type) -> type | None:
    return next((c for c in cls.__mro__ if _MARK in c.__dict__), None)


def is_torch_wrapper(cls: type) -> bool:
    """Whether torch made this class at run time around somebody's class, as ``fully_shard`` and ``parametrize`` do."""
    inner = cls.__bases__[-1]
    return _from_torch(cls) and not _from_torch(inner) and inner is not object


def _from_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def peel(cls: type) -> type:
    """The class as its author wrote it: without torch's run-time wrappers and without ours."""
    while True:
        if _MARK in cls.__dict__:
            cls = cls.__dict__[_MARK].origin
        elif is_torch_wrapper(cls):
            cls = cls.__bases__[-1]
        else:
            return cls


def replace_method(module: nn.Module, attribute: str, method: Method, journal: Journal) -> Reason | None:
    """Installs a method on an instance, besides those already installed on it; only its ``__class__`` changes.

    Returns:
        None, or the reason why the module was left as it is.
    """
    return _change(module, lambda methods: {**methods, attribute: method}, journal)


def remove_method(module: nn.Module, attribute: str) -> Reason | None:
    """Takes one installed method off an instance; the others stay. Returns None, or why it was left as it is."""
    return _change(module, lambda methods: {k: v for k, v in methods.items() if k != attribute}, None)


def restore_class(module: nn.Module) -> Reason | None:
    """Takes all installed methods off an instance: it has its original class again. Returns as ``remove_method``."""
    return _change(module, lambda methods: {}, None)


def _change(
    module: nn.Module, update: Callable[[dict[str, Method]], dict[str, Method]], journal: Journal | None
) -> Reason | None:
    current = type(module)
    owner = _generated(current)
    if owner is None:
        origin, methods, added_since = current, update({}), []
    else:
        installed: Installed = owner.__dict__[_MARK]
        origin, methods, journal = installed.origin, update(installed.methods), journal or installed.journal
        reason = _changed_by_others(current, owner, installed)
        if reason is not None:
            return reason
        wrappers = _wrappers(current)
        added_since = wrappers[: len(wrappers) - len(_wrappers(origin))]
    if methods:
        assert journal is not None
        target = _generate(origin, methods, journal)
    else:
        target = origin
    if added_since:
        assert journal is not None
        key = (target, *added_since)
        if key not in journal.classes:
            journal.classes[key] = _wrap_again(added_since, target)
        target = journal.classes[key]
    set_class(module, target)
    return None


def _changed_by_others(current: type, owner: type, installed: Installed) -> Reason | None:
    """Why what is installed can't be taken off: somebody else put something on top that would be lost."""
    wrappers = _wrappers(current)
    if (wrappers[-1].__bases__[-1] if wrappers else current) is not owner:
        return Reason("changed-since", f"the class is now {current.__qualname__}, which somebody else derived from ours")
    for name, method in installed.methods.items():
        if owner.__dict__.get(name) is not method.function:
            return Reason("changed-since", f"somebody else replaced {name} on the generated {owner.__qualname__}")
    return None


def set_class(module: nn.Module, cls: type) -> None:
    """Assigns the class; forwards of the old class that other tools keep bound on the instance follow."""
    current = type(module)
    module.__class__ = cls
    for attribute in BOUND_FORWARDS:
        if is_own_forward(module.__dict__.get(attribute), module, current):
            module.__dict__[attribute] = types.MethodType(cls.forward, module)  # type: ignore[attr-defined]


def is_own_forward(value: Any, module: nn.Module, cls: type) -> bool:
    """Whether ``value`` is nothing but the module's class's own ``forward``, bound."""
    return isinstance(value, types.MethodType) and value.__self__ is module and value.__func__ is cls.forward  # type: ignore[attr-defined]


def _generate(origin: type, methods: dict[str, Method], journal: Journal) -> type:
    key = (origin, *sorted((name, id(method)) for name, method in methods.items()))
    if key not in journal.classes:
        base = next((method.base for method in methods.values() if method.base), peel(origin))
        namespace: dict[str, Any] = {name: method.function for name, method in methods.items()}
        namespace |= {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_as_original,
            "__copy__": _copy,
            "__deepcopy__": _deepcopy,
            # HF kernels looks for this attribute; without it, it leaves the module alone.
            "kernel_layer_name": None,
            _MARK: Installed(origin, base, methods, journal),
        }
        generated = type(base)(base.__name__, (base,), namespace)
        journal.classes[key] = _wrap_again(_wrappers(origin), generated)
    return journal.classes[key]


def _wrappers(cls: type) -> list[type]:
    """The torch wrappers around a class, outermost first."""
    wrappers = []
    while is_torch_wrapper(cls):
        wrappers.append(cls)
        cls = cls.__bases__[-1]
    return wrappers


def _wrap_again(wrappers: list[type], inner: type) -> type:
    """The class that torch would have made, had it wrapped ``inner``."""
    for wrapper in reversed(wrappers):
        namespace = {k: v for k, v in wrapper.__dict__.items() if k not in ("__dict__", "__weakref__")}
        inner = type(wrapper)(wrapper.__name__, (*wrapper.__bases__[:-1], inner), namespace)
    return inner


def _original_reduce(module: nn.Module) -> tuple[Any, ...]:
    """``(function, arguments, state, …)`` of the base class, whatever it customises."""
    installed = installed_on(type(module))
    assert installed is not None
    return installed.base.__reduce_ex__(module, 4)  # type: ignore[return-value]


def _reduce_as_original(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    installed = installed_on(type(module))
    assert installed is not None
    function, arguments, *rest = _original_reduce(module)
    if function is copyreg.__newobj__:
        # pickle insists that __newobj__ gets the object's own class; the older constructor takes any.
        return (copyreg._reconstructor, (peel(installed.origin), object, None), *rest)  # type: ignore[attr-defined]
    return (function, arguments, *rest)


def _rebuild(module: nn.Module, copy_state: Callable[[Any], Any], memo: dict[int, Any]) -> nn.Module:
    cls = type(module)
    twin = cls.__new__(cls)
    memo[id(module)] = twin
    state = copy_state(_original_reduce(module)[2])
    twin.__setstate__(state)
    return twin


def _copy(module: nn.Module) -> nn.Module:
    return _rebuild(module, copy.copy, {})


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    inherited = getattr(installed_on(type(module)).base, "__deepcopy__", None)  # type: ignore[union-attr]
    if inherited is not None:
        return inherited(module, memo)
    return _rebuild(module, lambda state: copy.deepcopy(state, memo), memo)
