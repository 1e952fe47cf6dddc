"""How a method of one live module is replaced: the module gets a generated subclass of its class.

Nothing process-wide changes: two models of one class may differ, ``isinstance`` and ``__name__`` hold, and the
module's parameters, buffers, hooks and attributes stay as they are. What was installed is written on the generated
class, so a copy of the module knows it too. Pickles name the original class; a loaded model is the original, and so is
what is made by calling a generated class: the kernels are those of one instance's variant.
"""

from __future__ import annotations

import copy
import copyreg
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.kernel.metaclass import MARK, is_torch_wrapper, metaclass_for
from twinkle.kernel.metaclass import peel as peel  # whoever asks what is on a class asks for the class beneath, too
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

    from twinkle.kernel.journal import Journal, JournalRow

CONTAINERS = ("_parameters", "_buffers", "_modules")
"""Instance attributes in which torch keeps a module's tensors and children."""

BOUND_FORWARDS = ("forward", "_old_forward")
"""Instance attributes in which other tools keep a bound ``forward``: HF kernels and accelerate's hooks."""


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
    row: JournalRow
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
    return None if owner is None else owner.__dict__[MARK]


def _generated(cls: type) -> type | None:
    return next((c for c in cls.__mro__ if MARK in c.__dict__), None)


def replace_method(module: nn.Module, attribute: str, method: Method, journal: Journal) -> Reason | None:
    """Installs a method on an instance, besides those already installed on it; only its ``__class__`` changes.

    Returns:
        None, or the reason why the module was left as it is.
    """
    return _change(module, lambda methods: {**methods, attribute: method}, journal)


def carry_journal(module: nn.Module, journal: Journal) -> Reason | None:
    """Makes the class of a module carry a journal, whatever is installed on it: nothing, say. Returns as above."""
    return _change(module, lambda methods: methods, journal)


def remove_method(module: nn.Module, attribute: str) -> Reason | None:
    """Takes one installed method off an instance; with the last, its original class returns. Returns as above."""
    return _change(module, lambda methods: {k: v for k, v in methods.items() if k != attribute} or None, None)


def restore_class(module: nn.Module) -> Reason | None:
    """Gives an instance its original class again. Returns as above."""
    return _change(module, lambda methods: None, None)


def _change(
    module: nn.Module, update: Callable[[dict[str, Method]], dict[str, Method] | None], journal: Journal | None
) -> Reason | None:
    current = type(module)
    installed = installed_on(current)
    if installed is None:
        origin, methods = current, update({})
    else:
        reason = _changed_by_others(current, installed)
        if reason is not None:
            return reason
        origin, methods, journal = installed.origin, update(installed.methods), journal or installed.journal
    # Wrappers that torch has put around the class stay, whether they were there before us or came since.
    wrappers = _wrappers(current)
    if methods is not None:
        assert journal is not None
        try:
            inner = _generate(origin, methods, journal)
        except Exception as error:  # what __init_subclass__ and metaclasses may say
            return Reason.of_error(error, "no-subclass", f"deriving from {origin.__qualname__}")
    elif len(wrappers) == len(_wrappers(origin)):
        inner, wrappers = origin, []
    else:
        inner = peel(origin)
    if wrappers:
        assert journal is not None
        key = (inner, *wrappers)
        if key not in journal.classes:
            journal.classes[key] = _wrap_again(wrappers, inner)
        inner = journal.classes[key]
    try:
        set_class(module, inner)
    except TypeError as error:  # e.g. a subclass of the user's own has __slots__
        return Reason.of_error(error, "no-subclass", f"making a {inner.__qualname__} of the instance")
    return None


def _changed_by_others(current: type, installed: Installed) -> Reason | None:
    """Why what is installed can't be taken off: somebody else put something on top that would be lost."""
    owner, wrappers = _generated(current), _wrappers(current)
    assert owner is not None
    if (wrappers[-1].__bases__[-1] if wrappers else current) is not owner:
        text = f"the class is now {current.__qualname__}, which somebody else derived from ours"
        return Reason("changed-since", text)
    for name, method in installed.methods.items():
        if owner.__dict__.get(name) is not method.function:
            return Reason("changed-since", f"somebody else replaced {name} on the generated {owner.__qualname__}")
    return None


def set_class(module: nn.Module, cls: type) -> None:
    """Assigns the class; forwards of the old class that other tools keep bound on the instance follow."""
    current = type(module)
    object.__setattr__(module, "__class__", cls)  # past a __setattr__ that passes attributes on
    for attribute in BOUND_FORWARDS:
        if is_own_forward(module.__dict__.get(attribute), module, current):
            module.__dict__[attribute] = types.MethodType(cls.forward, module)  # type: ignore[attr-defined]


def is_own_forward(value: Any, module: nn.Module, cls: type) -> bool:
    """Whether ``value`` is nothing but the module's class's own ``forward``, bound."""
    return isinstance(value, types.MethodType) and value.__self__ is module and value.__func__ is cls.forward  # type: ignore[attr-defined]


def own_forward(module: nn.Module) -> Any:
    """A ``forward`` that the instance has besides its class's, and that runs instead of it; None when there is none."""
    cls, state = type(module), module.__dict__
    for attribute in BOUND_FORWARDS:
        bound = state.get(attribute)
        if bound is None or is_own_forward(bound, module, cls):
            continue
        if attribute == "forward" and is_own_forward(state.get("_old_forward"), module, cls):
            continue  # accelerate's hook calls _old_forward, which follows the class
        return bound
    return None


class _Hidden:
    """A class attribute that hides an inherited one: for ``hasattr`` and ``getattr`` there is none."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        raise AttributeError("hidden by twinkle.kernel")


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
            # HF kernels binds a forward of its own to every module whose class has this attribute.
            "kernel_layer_name": _Hidden(),
            MARK: Installed(origin, base, methods, journal),
        }
        # What is made with the base in place is told to the base's __init_subclass__, which may register it by name.
        made = metaclass_for(type(base))(base.__name__, (_Blank,), namespace)
        made.__bases__ = (base,)
        journal.classes[key] = made
    return journal.classes[key]


class _Blank:
    """What a class is derived from until it gets its real base."""


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
        if "__getstate__" in namespace and not hasattr(inner, "__deepcopy__"):
            # A parametrised class refuses to be pickled and so needs a way to be copied; ours brought one.
            namespace.setdefault("__deepcopy__", _deepcopy_parametrized)
        inner = type(inner)(wrapper.__name__, (*wrapper.__bases__[:-1], inner), namespace)
    return inner


def _reduce_as(cls: type, module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    return cls.__reduce_ex__(module, protocol)  # type: ignore


def _reduce_as_original(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    cls = type(module)
    installed = installed_on(cls)
    assert installed is not None
    original = peel(installed.origin)
    function, arguments, *rest = _reduce_as(installed.base, module, protocol)
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle insists that __newobj__ gets the object's own class; the older constructor takes any.
        return (copyreg._reconstructor, (original, object, None), *rest)  # type: ignore[attr-defined]
    function, *arguments = (original if part is cls else part for part in (function, *arguments))
    return (function, tuple(arguments), *rest)


def _copy(module: nn.Module) -> nn.Module:
    twin, state = _twin(module)
    twin.__setstate__(state)
    return twin


def _deepcopy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    installed = installed_on(type(module))
    assert installed is not None
    inherited = getattr(installed.base, "__deepcopy__", None)
    if inherited is not None:
        twin: nn.Module = inherited(module, memo)
        if type(twin) is peel(type(module)):  # made by calling its class
            set_class(twin, type(module))
    elif _is_parametrized(type(module)):
        twin = _deepcopy_parametrized(module, memo)
    else:
        twin, state = _twin(module)
        memo[id(module)] = twin
        twin.__setstate__(copy.deepcopy(state, memo))
    _adopt(twin, installed, memo)
    return twin


def _adopt(twin: nn.Module, installed: Installed, memo: dict[Any, Any]) -> None:
    """Puts a copy into the journal of the model that it is copied for."""
    if installed_on(type(twin)) is not installed:  # the class copies itself into something else
        return
    journal = installed.journal.for_copy(memo)
    if journal is not installed.journal:
        carry_journal(twin, journal)
    journal.modules.add(twin)


def _twin(module: nn.Module) -> tuple[nn.Module, Any]:
    """An object like ``module`` without state, and the state of ``module``: as its base class would be copied."""
    cls = type(module)
    installed = installed_on(cls)
    assert installed is not None
    function, arguments, *rest = _reduce_as(installed.base, module, 4)
    twin = function(*arguments)
    if type(twin) is not cls:
        set_class(twin, cls)
    return twin, rest[0] if rest else {}


def _is_parametrized(cls: type) -> bool:
    return any("__getstate__" in wrapper.__dict__ for wrapper in _wrappers(cls))


def _deepcopy_parametrized(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin
