"""Changing a model and the way back.

Two kinds of change exist: the class of a module (:mod:`twinkle.kernel.reclass`), and an attribute of any object, which
goes through :func:`patch`. Both are steps of a :class:`Transaction`, so a failing call takes back what it did, and both
are undone by :func:`unkernelize`, which never writes over what somebody else put on top.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.kernel.journal import (
    Journal,
    Patch,
    PatchConflict,
    Refused,
    forget_model,
    journals_of,
    lock,
    patch_of,
    release,
)
from twinkle.kernel.reclass import (
    BOUND_FORWARDS,
    Method,
    carry_journal,
    installed_on,
    own_forward,
    remove_method,
    replace_method,
    restore_class,
    set_class,
)
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

    from twinkle.kernel.rows import Row

logger = logging.getLogger("twinkle.kernel")


class Transaction:
    """The changes of one ``kernelize`` call, each with the step that takes it back.

    Attributes:
        journal: where the changes are written down.
        assignments: what the default installer shall install now (see :mod:`twinkle.kernel.install`).
        row: the report row of what is being installed.
        rows: that and those before it, of this call.
        touched: (id of an object, attribute) of everything changed so far.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.row: Row | None = None
        self.rows: list[Row] = []
        self.assignments: list[Any] = []
        self.touched: set[tuple[int, str]] = set()
        self._steps: list[Callable[[], list[Reason] | None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def replace_method(self, module: nn.Module, attribute: str, method: Method) -> Reason | None:
        """Installs a method on an instance; returns None, or why the instance was left as it is."""
        self.journal.modules.add(module)
        self._change_class(module)
        return replace_method(module, attribute, method, self.journal)

    def patch_method(self, module: nn.Module, attribute: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """See :func:`patch_method`."""
        assert self.row is not None
        installed = installed_on(type(module))
        there = installed.methods.get(attribute) if installed else None
        where = f"{type(module).__qualname__}.{attribute}"
        if there is not None and there.row.target != self.row.target:
            raise PatchConflict(f"{where} already carries the kernel of {there.row.target}")
        original = there.original if there is not None else getattr(type(module), attribute)
        # Modules that get the same method share a generated class.
        key = (make, original, id(self.row))
        if key not in self.journal.methods:
            self.journal.methods[key] = Method(make(original), original, self.row)
        reason = self.replace_method(module, attribute, self.journal.methods[key])
        if reason is not None:
            raise Refused(f"{where}: {reason}")

    def remove_method(self, module: nn.Module, attribute: str) -> Reason | None:
        """Takes a method of an earlier call off; returns as ``replace_method``."""
        installed = installed_on(type(module))
        self._change_class(module)
        reason = remove_method(module, attribute)
        if installed is not None and installed_on(type(module)) is None:  # that was the last: it is the original again
            installed.journal.modules.discard(module)
        return reason

    def carry_journal(self, model: nn.Module) -> None:
        """Makes the model itself carry the journal where no module of it does, so that a deep copy is noticed.

        Where its class can't be derived from, a copy is not: it then shares the kernels without a journal of its own.
        """
        if self.journal.patches and not any(True for _ in self.journal.modules):
            self._change_class(model)
            if carry_journal(model, self.journal) is None:
                self.journal.modules.add(model)

    def _change_class(self, module: nn.Module) -> None:
        self.touched |= {(id(module), name) for name in ("__class__", *BOUND_FORWARDS)}
        self._steps.append(functools.partial(self._class_back, module, type(module)))

    def _class_back(self, module: nn.Module, cls: type) -> None:
        set_class(module, cls)
        installed = installed_on(cls)
        if installed is None:
            self.journal.modules.discard(module)
        else:
            installed.journal.modules.add(module)

    def patch(self, obj: Any, name: str, value: Any) -> None:
        """Replaces an attribute, or shares the replacement when it is the one that is there."""
        self.touched.add((id(obj), name))
        current = patch_of(obj, name)
        if current is not None and current.value is not value:
            raise PatchConflict(f"{current.where} already carries another kernel, for a model that is still alive")
        if current is None:
            current = Patch.on(obj, name, value)
            current.apply()
        if self.journal not in current.claims:
            self.journal.claim(current)
            self._steps.append(functools.partial(self._give_up, current))
        if patch_of(obj, name) is not current:  # the last of its models was collected before we claimed it
            current.apply()

    def undo_patch(self, patch_: Patch) -> list[Reason]:
        """Gives up an earlier patch of this journal as part of the call."""
        self._steps.append(functools.partial(self._claim_again, patch_))
        return self._give_up(patch_)

    def _give_up(self, patch_: Patch) -> list[Reason]:
        self.journal.patches.remove(patch_)
        return release(self.journal, [patch_])

    def _claim_again(self, patch_: Patch) -> None:
        if not patch_.claimed:
            patch_.apply()
        self.journal.claim(patch_)

    def steps_done(self) -> None:
        """Lets go of everything that the transaction refers to."""
        self._steps.clear()
        self.assignments = []
        self.row = None
        self.rows = []

    def rollback(self, to: int = 0) -> list[Reason]:
        """Takes back the steps after the first ``to``, last first; says what could not be."""
        left: list[Reason] = []
        while len(self._steps) > to:
            left += self._steps.pop()() or []
        return left


NOT_TAKEN_BACK = "twinkle.kernel could not take back: "
"""How an error's notes on what a rollback left begin."""

_active: contextvars.ContextVar[Transaction | None] = contextvars.ContextVar("twinkle_transaction", default=None)


@contextlib.contextmanager
def transaction(journal: Journal) -> Iterator[Transaction]:
    """Makes a transaction the active one; an exception rolls it back and goes up, with notes on what is left."""
    current = Transaction(journal)
    with lock:
        token = _active.set(current)
        try:
            yield current
        except BaseException as error:
            for reason in current.rollback():
                error.add_note(f"{NOT_TAKEN_BACK}{reason}")
            raise
        finally:
            _active.reset(token)
            # They refer to modules and to the transaction itself, and would keep both until the garbage is collected.
            current.steps_done()


def active_transaction() -> Transaction | None:
    """The transaction that installers write to, if one is under way."""
    return _active.get()


def installing(caller: str) -> Transaction:
    """The same for ``caller``, which only an installer may call; a RuntimeError where none is under way."""
    current = active_transaction()
    if current is None:
        raise RuntimeError(f"{caller} was called outside kernelize(); it is for installers, which kernelize() runs")
    return current


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
    from twinkle.kernel.targets import check_model

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
    from twinkle.kernel.core import kernelize

    kernelize(model, mapping, **options)
    try:
        yield model
    finally:
        unkernelize(model)
