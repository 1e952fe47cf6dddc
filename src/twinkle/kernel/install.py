"""Putting loaded kernels at their sites: which kinds fit which targets, and the default installer."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils import parametrize

from twinkle.kernel.calls import Router, counted, renamed_parameters
from twinkle.kernel.reclass import BOUND_FORWARDS, Method, installed_on, is_own_forward
from twinkle.kernel.targets import Site, Target, resolve_target
from twinkle.kernel.undo import PatchConflict, active_transaction, patch_of, register_model, transaction
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.report import Row


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded implementation, taken apart for the target it goes to.

    Attributes:
        function: what is called with the original's arguments (``self`` first for a method).
        accepts_call: a reason sends one call to the original.
        renamed: the original's parameter names -> the kernel's, where they differ.
        base: the user's own subclass of the target's class, when that is what was given.
        name: qualified name of what serves.
    """

    function: Callable[..., Any]
    accepts_call: Callable[..., str | None] | None
    renamed: dict[str, str]
    base: type | None
    name: str


def kernel_for(target: Target, original: Any, impl: Any) -> Kernel | Reason:
    """Matches the kind of an implementation with the kind of a target.

    A class is never assigned as if it were a function, and a function never taken for a class.
    """
    name = _qualified_name(impl)
    accepts_call = getattr(impl, "accepts_call", None)
    if target.kind == "function":
        if isinstance(impl, type) or not callable(impl):
            return Reason("kind", f"{name} is a {_kind(impl)}, the target is a function: give a function")
        function, base = impl, None
    elif isinstance(impl, type):
        found = _method_of_class(target, impl, name)
        if isinstance(found, Reason):
            return found
        function, base = found
    elif target.kind == "class":
        hint = f"map {target.label}.forward, or give a class"
        return Reason("kind", f"{name} is a {_kind(impl)}, the target is a class", hint)
    elif isinstance(impl, nn.Module) or not callable(impl):
        return Reason("kind", f"{name} is a {_kind(impl)}, the target is a method: give a function or a layer class")
    else:
        function, base = impl, None
    renamed = renamed_parameters(original, function)
    if isinstance(renamed, Reason):
        return renamed
    return Kernel(function, accepts_call, renamed, base, name)


def _method_of_class(target: Target, impl: type, name: str) -> tuple[Callable[..., Any], type | None] | Reason:
    if not issubclass(impl, nn.Module):
        return Reason("kind", f"{name} is a class but no nn.Module, so it brings no forward for a layer")
    attribute = target.attribute
    function = getattr(impl, attribute, None)
    if not isinstance(function, types.FunctionType):
        return Reason("kind", f"{name} has no method {attribute}")
    if issubclass(impl, target.owner):
        return function, impl if target.kind == "class" else None
    if impl.__init__ is not nn.Module.__init__:
        hint = f"derive it from {target.owner.__qualname__}, or leave out __init__ as the Hub's layer contract asks"
        return Reason("kind", f"{name} has an __init__ of its own, which never runs on a live instance", hint)
    return function, None


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "function" if inspect.isroutine(value) else type(value).__name__


def _qualified_name(impl: Any) -> str:
    source = impl if isinstance(impl, type) or inspect.isroutine(impl) else type(impl)
    return f"{source.__module__}.{source.__qualname__}"


def obstacle(site: Site) -> Reason | None:
    """Why nothing can be installed at a site, whatever the kernel; None when something can."""
    if site.module is None:
        return _patched_by_others(site.original, site.name)
    module, cls = site.module, type(site.module)
    if parametrize.is_parametrized(module):
        return Reason("parametrized", "its weights are parametrised", "remove the parametrisation, or kernelize first")
    if site.attribute == "forward":
        for attribute in BOUND_FORWARDS:
            bound = module.__dict__.get(attribute)
            if bound is None or is_own_forward(bound, module, cls):
                continue
            if attribute == "forward" and is_own_forward(module.__dict__.get("_old_forward"), module, cls):
                continue  # accelerate's hook calls _old_forward, which follows the class
            return _own_forward_reason(bound)
    return _patched_by_others(getattr(cls, site.attribute, None), site.owner.__qualname__)


def _own_forward_reason(bound: Any) -> Reason:
    others = _patched_by_others(getattr(bound, "__func__", bound), "its forward")
    return others or Reason("own-forward", "the instance has a forward of its own, which would shadow the kernel")


def _patched_by_others(value: Any, what: str) -> Reason | None:
    home = getattr(value, "__module__", None) or ""
    for package, name in (("liger_kernel", "Liger"), ("unsloth", "Unsloth"), ("kernels", "HF kernels")):
        # HF kernels wraps functions without replacing them; only its layers are somebody else's kernel.
        if home.partition(".")[0] == package and not isinstance(value, nn.Module):
            return Reason("already-patched", f"{what} was already patched by {name}", "undo that, or leave it as it is")
    return None


@dataclass(frozen=True, eq=False)
class Assignment:
    """One site and the kernel that shall serve it, for the report row that counts it."""

    site: Site
    kernel: Kernel
    impl: Any
    row: Row
    served_by: tuple[Any, ...] = ()


def default_installer(model: nn.Module, target: Any, impl: Any) -> int:
    """Installs one implementation at a target's sites: re-classes instances, routes process-wide functions.

    Inside ``kernelize`` the sites are the ones that accepted the implementation; called on its own, all of the model's.

    Args:
        model: changed in place.
        target: a mapping key or a Target.
        impl: as :class:`~twinkle.kernel.registry.KernelImpl` loads it, or the user's own class or function.

    Returns:
        the number of sites changed.

    Raises:
        ValueError: the implementation is of no kind that the target takes.
    """
    current = active_transaction()
    if current is not None:
        assigned = [a for a in current.assignments if a.impl is impl]
        for assignment in assigned:
            install_at(assignment)
        return len(assigned)
    return _install_everywhere(model, resolve_target(target), impl)


def _install_everywhere(model: nn.Module, target: Any, impl: Any) -> int:
    from twinkle.kernel.report import Row
    from twinkle.kernel.targets import ModelIndex
    from twinkle.kernel.undo import enter_model

    if not isinstance(target, Target):
        raise ValueError(str(target.reason))
    row = Row(target.label, None, "installed", backend="custom")
    journal = enter_model(model)
    with transaction(journal):
        for site in ModelIndex.of(model, None).sites(target):
            kernel = kernel_for(target, site.original, impl)
            reason = kernel if isinstance(kernel, Reason) else obstacle(site)
            if reason is not None:
                raise ValueError(f"{site.name}: {reason}")
            install_at(Assignment(site, kernel, impl, row))  # type: ignore[arg-type]
            row.instances += 1
        register_model(model, journal)
    journal.rows.append(row)
    return row.instances


def install_at(assignment: Assignment) -> None:
    """The one mutation of the default installer, at one site."""
    current = active_transaction()
    assert current is not None
    site, kernel, row = assignment.site, assignment.kernel, assignment.row
    if site.module is None:
        _route(assignment)
        return
    # Two instances that share kernel, original and row share a Method, and so a generated class.
    key = (id(kernel.function), kernel.accepts_call, kernel.base, site.original, id(row))
    if key not in current.journal.methods:
        function = counted(
            kernel.function, site.original, row.counts, accepts_call=kernel.accepts_call, renamed=kernel.renamed
        )
        current.journal.methods[key] = Method(function, site.original, row, kernel.base)
    reason = current.replace_method(site.module, site.attribute, current.journal.methods[key])
    if reason is not None:
        raise PatchConflict(f"{site.name}: {reason}")


def _route(assignment: Assignment) -> None:
    current = active_transaction()
    assert current is not None
    site, kernel = assignment.site, assignment.kernel
    existing = patch_of(site.owner, site.attribute)
    if existing is not None:
        router = getattr(existing.value, "twinkle_router", None)
        if router is None or router.served_by != assignment.served_by:
            raise PatchConflict(f"{site.name} already serves another model of this process with another kernel")
        value = existing.value
    else:
        router = Router(site.original, assignment.served_by)
        value = router.around(kernel.function, kernel.accepts_call, kernel.renamed)
    assignment.row.counts = router.counts
    current.patch(site.owner, site.attribute, value)


Snapshot = dict[tuple[int, str], tuple[str, int]]
"""(id of an object, attribute) -> (where that is, id of the value)."""


def snapshot(model: nn.Module) -> Snapshot:
    """What an installer could change besides through ``patch``: classes and attributes of the model's modules, the
    ``forward`` of their classes, and the functions of the Python modules that define them."""
    state: Snapshot = {}
    owners: dict[int, tuple[str, Any, tuple[str, ...] | None]] = {}
    for name, module in model.named_modules():
        where = name or "the model"
        state[id(module), "__class__"] = (f"{where}.__class__", id(type(module)))
        for key, value in module.__dict__.items():
            if not key.startswith("_") or key in BOUND_FORWARDS:
                state[id(module), key] = (f"{where}.{key}", id(value))
        for cls in type(module).__mro__:
            if cls.__module__.partition(".")[0] not in ("torch", "builtins") and installed_on(cls) is None:
                owners[id(cls)] = (f"{cls.__module__}.{cls.__qualname__}", cls, ("forward",))
                owners.setdefault(id(sys.modules[cls.__module__]), (cls.__module__, sys.modules[cls.__module__], None))
    for key, (where, owner, names) in owners.items():
        for name, value in list(vars(owner).items()):
            if (names is None and callable(value)) or (names and name in names):
                state[key, name] = (f"{where}.{name}", id(value))
    return state


def changed_outside(before: Snapshot, after: Snapshot, journalled: set[tuple[int, str]]) -> list[str]:
    """Where two snapshots differ, but for what the journal knows."""
    keys = {k for k in before.keys() | after.keys() if before.get(k, ("", 0))[1] != after.get(k, ("", 0))[1]}
    return sorted((after.get(k) or before[k])[0] for k in keys - journalled)
