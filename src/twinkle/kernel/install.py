"""Putting loaded kernels at their sites: which kinds fit which targets, the default installer, and how any installer
replaces a function of the whole process."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from twinkle.kernel.calls import Router, counted, renamed_parameters, router_of
from twinkle.kernel.journal import ABSENT, JournalRow, Patch, PatchConflict, enter_model, lock, patch_of, register_model
from twinkle.kernel.passed import Watched
from twinkle.kernel.reclass import Method, own_forward
from twinkle.kernel.targets import ModelIndex, Site, Target, resolve_target
from twinkle.kernel.transaction import active_transaction, installing, transaction
from twinkle.kernel.wrappers import beneath
from twinkle.naming import top_package
from twinkle.reasons import Counts, Reason


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded implementation, taken apart for the target it goes to.

    Attributes:
        function: what is called with the original's arguments (``self`` first for a method).
        accepts_call: a reason sends one call to the original.
        renamed: the original's parameter names -> the kernel's, where they differ.
        base: the user's own subclass of the target's class, when that is what was given.
        name: qualified name of what serves.
        watched: what it goes past at the site, asked for its hooks and changes before ``accepts_call``.
    """

    function: Callable[..., Any]
    accepts_call: Callable[..., str | None] | None
    renamed: dict[str, str]
    base: type | None
    name: str
    watched: Watched = Watched()


def kernel_for(target: Target, original: Any, impl: Any) -> Kernel | Reason:
    """Matches the kind of an implementation with the kind of a target.

    A class is never assigned as if it were a function, and a function never taken for a class.
    """
    name = _qualified_name(impl)
    accepts_call = getattr(impl, "accepts_call", None)
    if target.kind == "logical":  # its installer knows how to call it
        return Kernel(impl, accepts_call, {}, None, name)
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
    if not isinstance(function, types.FunctionType) or function is getattr(nn.Module, attribute, None):
        return Reason("kind", f"{name} has no method {attribute} of its own")
    if issubclass(impl, target.owner) and target.kind == "class":
        return function, impl
    derive = f"derive it from {target.owner.__qualname__} and map the class"
    if "__class__" in function.__code__.co_freevars:
        return Reason("kind", f"{name}.{attribute} uses super(), which only instances of {name} can", derive)
    if impl.__init__ is not nn.Module.__init__ and not issubclass(impl, target.owner):
        hint = f"{derive}, or leave out __init__ as the Hub's layer contract asks"
        return Reason("kind", f"{name} has an __init__ of its own, which never runs on a live instance", hint)
    further = sorted(set(dir(impl)) - set(dir(nn.Module)) - set(dir(target.owner)) - {attribute, *_LAYER_MEMBERS})
    if further:
        text = f"{name} has members besides {attribute}, which a live instance won't have: {', '.join(further)}"
        return Reason("kind", text, f"{derive}, or make them functions outside the class")
    return function, None


_LAYER_MEMBERS = ("accepts_call", "can_torch_compile", "has_backward", "__annotations__", "__orig_bases__")
"""What a layer class may say about itself: read from the class, so instances need not have it."""


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
        original = site.original
        # HF kernels makes a module of a function, and binds a forward to it when it replaces the function.
        if isinstance(original, nn.Module) and own_forward(original) is not None:
            return _already_patched(site.name, "HF kernels")
        return _patched_by_others(original, site.name)
    module, cls = site.module, type(site.module)
    if parametrize.is_parametrized(module):
        return Reason("parametrized", "its weights are parametrised", "remove the parametrisation, or kernelize first")
    bound = own_forward(module) if site.attribute == "forward" else None
    if bound is not None:
        return _own_forward_reason(bound, cls)
    return _patched_by_others(getattr(cls, site.attribute, None), site.owner.__qualname__)


def _own_forward_reason(bound: Any, cls: type) -> Reason:
    function = getattr(bound, "__func__", bound)
    others = _patched_by_others(function, "its forward")
    if others is not None:
        return others
    name = _qualified_name(function)
    # HF kernels binds the forward of a layer class to modules of the classes that it knows.
    if getattr(cls, "kernel_layer_name", None) and bound is not function and name.endswith(".forward"):
        return _already_patched("its forward", f"HF kernels ({name})")
    return Reason("own-forward", f"the instance has a forward of its own ({name}), which would shadow the kernel")


def _patched_by_others(value: Any, what: str) -> Reason | None:
    home = top_package(getattr(value, "__module__", None))
    by = {"liger_kernel": "Liger", "unsloth": "Unsloth"}.get(home)
    return _already_patched(what, by) if by else None


def _already_patched(what: str, by: str) -> Reason:
    return Reason("already-patched", f"{what} was already patched by {by}", "undo that, or leave it as it is")


@dataclass(frozen=True, eq=False)
class Assignment:
    """One site and the kernel that shall serve it, for the report row that counts it."""

    site: Site
    kernel: Kernel
    impl: Any
    row: JournalRow
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
    with lock:
        return _install_everywhere(model, resolve_target(target), impl)


def _install_everywhere(model: nn.Module, target: Any, impl: Any) -> int:
    if not isinstance(target, Target):
        raise ValueError(str(target.reason))
    sites = ModelIndex.of(model, None).sites(target)
    covers = frozenset((site.owner, site.attribute) for site in sites)
    row = JournalRow(target.label, None, "installed", backend="custom", instances=len(sites), covers=covers)
    journal = enter_model(model)
    with transaction(journal) as current:
        for site in sites:
            kernel = kernel_for(target, site.original, impl)
            reason = kernel if isinstance(kernel, Reason) else obstacle(site)
            if reason is not None:
                raise ValueError(f"{site.name}: {reason}")
            install_at(Assignment(site, kernel, impl, row))  # type: ignore[arg-type]
        current.carry_journal(model)
        register_model(model, journal)
    journal.rows.append(row)
    return len(sites)


def install_at(assignment: Assignment) -> None:
    """The one mutation of the default installer, at one site."""
    current = active_transaction()
    assert current is not None
    site, kernel, row = assignment.site, assignment.kernel, assignment.row
    if site.module is None:
        at = site.owner, site.attribute
        if patch_of(*at) is not None and _serving(*at, assignment.served_by) is None:
            raise PatchConflict(f"{site.name} already serves another model of this process with another kernel")
        _route(*at, site.original, kernel, row, assignment.served_by)
        return
    # Two instances that share kernel, original and row share a Method, and so a generated class.
    key = (id(kernel.function), kernel.accepts_call, kernel.watched, kernel.base, site.original, id(row))
    if key not in current.journal.methods:
        accepts_call = kernel.watched.guard(kernel.accepts_call)
        function = counted(
            kernel.function, site.original, row.counts, accepts_call=accepts_call, renamed=kernel.renamed
        )
        function = beneath(site.original, function)
        current.journal.methods[key] = Method(function, site.original, row, kernel.base)
    reason = current.replace_method(site.module, site.attribute, current.journal.methods[key])
    if reason is not None:
        raise PatchConflict(f"{site.name}: {reason}")


def patch_function(obj: Any, name: str, kernel: Callable[..., Any]) -> None:
    """:func:`~twinkle.kernel.undo.patch` for a function: its calls are counted in the report, and those that the
    kernel's ``accepts_call`` refuses go to the function that was there.

    All that one entry of a mapping puts in place counts together. Models that the same backend of the same op serves
    share one replacement, and its counts.

    Args:
        obj: what holds the function: a Python module or a mapping.
        name: its name there.
        kernel: called as the function is.

    Raises:
        AttributeError: there is nothing of that name.
        RuntimeError: called outside an installer, or another kernel is there, for a model that is still alive.
    """
    row = installing("patch_function()").row
    assert row is not None
    there = Patch.on(obj, name, kernel)
    if there.original is ABSENT:
        raise AttributeError(f"{there.where} doesn't exist, so a kernel can't take its place")
    function = Kernel(kernel, getattr(kernel, "accepts_call", None), {}, None, _qualified_name(kernel))
    _route(obj, name, there.original, function, row, (row.op, row.backend))


def _route(obj: Any, name: str, original: Any, kernel: Kernel, row: JournalRow, served_by: tuple[Any, ...]) -> None:
    """Puts a router in a function's place, or shares the one there that serves in the same way; counts in the row."""
    current = active_transaction()
    assert current is not None
    shared = _serving(obj, name, served_by)
    if shared is not None:
        value, row.counts = shared
    else:
        router = Router(name, original, served_by, row.counts)
        value = router.around(kernel.function, kernel.accepts_call, kernel.renamed)
    current.patch(obj, name, value)


def _serving(obj: Any, name: str, served_by: tuple[Any, ...]) -> tuple[Any, Counts] | None:
    """What already stands in a function's place and serves in this way, and what it counts in."""
    there = patch_of(obj, name)
    router = None if there is None else router_of(there.value)
    if there is None or router is None or router.served_by != served_by:
        return None
    return there.value, router.counts
