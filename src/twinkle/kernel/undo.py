"""The way back: what installers write through so that there is one, and :func:`unkernelize`, which goes it.

It never writes over what somebody else put on top.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.kernel.core import kernelize
from twinkle.kernel.journal import Journal, forget_model, journals_of, lock, release
from twinkle.kernel.reclass import installed_on, own_forward, restore_class
from twinkle.kernel.targets import check_model
from twinkle.kernel.transaction import active_transaction as active_transaction  # installers look for it beside patch()
from twinkle.kernel.transaction import installing
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("twinkle.kernel")


def patch(obj: Any, name: str, value: Any) -> None:
    """What a custom installer writes through: sets an attribute of any object, or an item of a mapping.

    The change is in the journal: it is rolled back when the installer raises and undone by :func:`unkernelize`. A
    patch of something process-wide lasts until the last model that asked for it is undone or gone; a deep copy of the
    model asks for it too. What is patched on a module itself is copied with it as any attribute is, and not undone on
    the copy: re-class modules (``default_installer``) where copies matter.

    Raises:
        RuntimeError: called outside an installer, or the attribute carries another kernel of a living model.
    """
    installing("patch()").patch(obj, name, value)


def patch_method(module: nn.Module, attribute: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """The same for a method of one module: its class is replaced by a generated subclass that has another method.

    Nothing process-wide changes, and the module can be copied, pickled and undone as what the default installer changes
    can.

    Args:
        module: the instance.
        attribute: the method's name.
        make: from the original function to the one to install; both take ``self`` first. Modules of one class that are
            given the same ``make`` object share what it makes.

    Raises:
        RuntimeError: called outside an installer; or another kernel is there, or the class can't be derived from,
            which ends as a row ``refused``.
    """
    installing("patch_method()").patch_method(module, attribute, make)


@dataclass(frozen=True)
class Undone:
    """What :func:`unkernelize` did.

    Attributes:
        modules: modules that have their original class again.
        patches: attributes that have their original value again.
        not_undone: one reason per change that was left, because somebody else changed the same thing since.
        shared: process-wide attributes that another model still claims, and modules that it has as well; their
            originals return with its undo.
    """

    modules: int = 0
    patches: int = 0
    not_undone: tuple[Reason, ...] = ()
    shared: tuple[str, ...] = ()


def unkernelize(model: nn.Module) -> Undone:
    """Brings back exactly what was there before the first :func:`~twinkle.kernel.kernelize` of this model.

    A second call does nothing. What somebody else put on top since is left, with a reason in the result and a WARNING.
    A process-wide function returns when the last model that claimed it is undone. A model under ``torch.compile``
    compiles anew at its next call; a program that was exported keeps the kernels it was exported with.

    Args:
        model: the model, one that wraps it, a copy of it, or a part of it.
    """
    check_model(model, "unkernelize")
    with lock:
        journals = journals_of(model)
        not_undone: list[Reason] = []
        modules = {module: name for name, module in model.named_modules()}
        patches, shared = 0, list[str]()
        for journal in journals:
            for owner in [m for m in journal.models if _is_same_model(m, model)]:
                forget_model(owner, journal)
            if len(journal.models) == 0:
                claimed = list(journal.patches)
                journal.patches.clear()
                unreturned = release(journal, claimed)
                not_undone += unreturned
                shared += [patch_.where for patch_ in claimed if patch_.claimed]
                gone = sum(patch_.owner is None for patch_ in claimed if not patch_.claimed)
                patches += sum(not patch_.claimed for patch_ in claimed) - gone - len(unreturned)
                journal.rows.clear()
        # Where an installer had put another child, the model has its own again now.
        modules |= {module: name for name, module in model.named_modules()}
        used_elsewhere = _modules_of_others(model, journals)
        restored = 0
        for module, name in modules.items():
            if id(module) in used_elsewhere:
                shared += [name] if installed_on(type(module)) else []
                continue
            installed = installed_on(type(module))
            not_undone += _restore_module(name or "the model", module, journals)
            had_kernels = installed is not None and bool(installed.methods)
            restored += had_kernels and installed_on(type(module)) is None
    for reason in not_undone:
        logger.warning("not undone: %s", reason)
    return Undone(restored, patches, tuple(not_undone), tuple(shared))


def _modules_of_others(model: nn.Module, journals: list[Journal]) -> set[int]:
    """Ids of the modules that another kernelized model has too, one that this model is no part of."""
    owners = [owner for journal in journals for owner in journal.models]
    others = [owner for owner in owners if not any(module is model for module in owner.modules())]
    return {id(module) for owner in others for module in owner.modules()}


def _restore_module(name: str, module: nn.Module, journals: list[Journal]) -> list[Reason]:
    """Gives one module its class back; says what somebody else has put there since."""
    cls = type(module)
    installed = installed_on(cls)
    if installed is None:
        known = [journal for journal in journals if module in journal.modules]
        for journal in known:
            journal.modules.discard(module)
        return [Reason("changed-since", f"{name}: somebody else made it a {cls.__qualname__}")] if known else []
    installed.journal.modules.discard(module)
    reason = restore_class(module)
    if reason is not None:
        return [Reason(reason.code, f"{name}: {reason.text}", reason.hint)]
    if "forward" in installed.methods and own_forward(module) is not None:
        text = f"{name}: somebody else gave it a forward of its own, which may still hold the kernel"
        return [Reason("changed-since", text, "take that off")]
    return []


def _is_same_model(owner: nn.Module, model: nn.Module) -> bool:
    """Whether undoing ``model`` undoes all of ``owner``: it contains it, or is what a wrapper without weights wraps."""
    if any(module is owner for module in model.modules()):
        return True
    inside = {id(parameter) for parameter in model.parameters()}
    return any(module is model for module in owner.modules()) and all(id(p) in inside for p in owner.parameters())


@contextlib.contextmanager
def kernelized(model: nn.Module, mapping: Any = None, **options: Any) -> Iterator[nn.Module]:
    """``with kernelized(model): …``: :func:`~twinkle.kernel.kernelize` on entry, :func:`unkernelize` on exit.

    The exit also takes off what earlier calls had installed on the model.
    """
    kernelize(model, mapping, **options)
    try:
        yield model
    finally:
        unkernelize(model)
