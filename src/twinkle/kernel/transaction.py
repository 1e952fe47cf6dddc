"""Changing a model, so that what a failing call has done is taken back.

Two kinds of change exist: the class of a module (:mod:`twinkle.kernel.reclass`), and an attribute of any object. Each
is a step of a :class:`Transaction`, and written down in the model's journal.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from twinkle.kernel.journal import Journal, JournalRow, Patch, PatchConflict, Refused, lock, patch_of, release
from twinkle.kernel.reclass import (
    BOUND_FORWARDS,
    Method,
    carry_journal,
    installed_on,
    remove_method,
    replace_method,
    set_class,
)
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn


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
        self.row: JournalRow | None = None
        self.rows: list[JournalRow] = []
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
