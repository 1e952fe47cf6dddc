"""The journal of what was installed, and the way back.

Two kinds of change exist: the class of a module (:mod:`twinkle.kernel.reclass`), and an attribute of any object, which
goes through :func:`patch`. Both are steps of a :class:`Transaction`, so a failing call takes back what it did, and both
are undone by :func:`unkernelize`, which never writes over what somebody else put on top.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.kernel.reclass import (
    BOUND_FORWARDS,
    Method,
    installed_on,
    remove_method,
    replace_method,
    restore_class,
    set_class,
)
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

    from twinkle.kernel.report import Row

logger = logging.getLogger("twinkle.kernel")

_ABSENT = object()


class Journal:
    """What one model carries. Copies of the model share it; it dies with the last of them.

    Attributes:
        classes: the generated classes, by what they are made of.
        methods: the installed methods, by what they are made of, so that equal instances share a class.
        rows: the report rows of what was planned and installed.
        patches: the attribute patches that this journal claims.
        models: the models that ``kernelize`` was called with.
    """

    def __init__(self) -> None:
        self.classes: dict[tuple[Any, ...], type] = {}
        self.methods: dict[tuple[Any, ...], Method] = {}
        self.rows: list[Row] = []
        self.patches: list[Patch] = []
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # When the last model that claims a process-wide patch is gone, the original returns.
        weakref.finalize(self, _release_orphans, self.patches).atexit = False


_journals: weakref.WeakKeyDictionary[nn.Module, Journal] = weakref.WeakKeyDictionary()


def journals_of(model: nn.Module) -> list[Journal]:
    """The journals of whatever is installed on a model, its parts or the model it was copied from."""
    found: dict[int, Journal] = {}
    for module in model.modules():
        journal = _journals.get(module)
        installed = installed_on(type(module))
        for known in (journal, installed and installed.journal):
            if known:
                found[id(known)] = known
    return list(found.values())


class PatchConflict(RuntimeError):
    """An attribute already carries another kernel, for a model that is still alive."""


@dataclass(eq=False)
class Patch:
    """One replaced attribute (or item of a mapping), and the journals that want it so."""

    holder: Any
    name: str
    value: Any
    original: Any
    claims: weakref.WeakSet[Journal] = field(default_factory=weakref.WeakSet)

    @classmethod
    def on(cls, obj: Any, name: str, value: Any) -> Patch:
        # A model must be able to die while it carries patches.
        return cls(weakref.ref(obj) if _is_torch_module(obj) else obj, name, value, _read(obj, name))

    @property
    def owner(self) -> Any:
        return self.holder() if isinstance(self.holder, weakref.ref) else self.holder

    @property
    def where(self) -> str:
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def apply(self) -> None:
        _write(self.owner, self.name, self.value)
        _patches[self.key] = self
        _set_active(self.value, True)

    def restore(self) -> Reason | None:
        """Puts the original back where the value is still ours; otherwise says why not."""
        _set_active(self.value, False)
        _patches.pop(self.key, None)
        if self.owner is None:
            return None
        if _read(self.owner, self.name) is not self.value:
            return Reason("changed-since", f"{self.where} was replaced by somebody else")
        _write(self.owner, self.name, self.original)
        return None


_patches: dict[tuple[int, str], Patch] = {}


def _set_active(value: Any, active: bool) -> None:
    """A router that somebody still holds after the undo passes every call on to the original."""
    if hasattr(value, "twinkle_router"):
        value.twinkle_router.active = active


def _is_torch_module(obj: Any) -> bool:
    from torch import nn

    return isinstance(obj, nn.Module)


def _read(holder: Any, name: str) -> Any:
    return holder.get(name, _ABSENT) if isinstance(holder, MutableMapping) else vars(holder).get(name, _ABSENT)


def _write(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        if value is _ABSENT:
            del holder[name]
        else:
            holder[name] = value
    elif value is _ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def patch_of(obj: Any, name: str) -> Patch | None:
    """The live patch on an attribute, if there is one."""
    return _patches.get((id(obj), name))


def _release(journal: Journal, patches: list[Patch]) -> list[Reason]:
    """Gives up the journal's claims; what nobody claims any more is restored."""
    reasons = []
    for claimed in reversed(patches):
        claimed.claims.discard(journal)
        reasons.append(None if claimed.claims else claimed.restore())
    return [reason for reason in reasons if reason]


def _release_orphans(patches: list[Patch]) -> None:
    for orphan in reversed(patches):
        if not orphan.claims and _patches.get(orphan.key) is orphan:
            orphan.restore()


class Transaction:
    """The changes of one ``kernelize`` call, each with the step that takes it back.

    Attributes:
        journal: where the changes are written down.
        assignments: what the default installer shall install now (see :mod:`twinkle.kernel.install`).
        touched: (id of an object, attribute) of everything changed so far.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.assignments: list[Any] = []
        self.touched: set[tuple[int, str]] = set()
        self._steps: list[Callable[[], list[Reason] | None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def replace_method(self, module: nn.Module, attribute: str, method: Method) -> Reason | None:
        self._change_class(module)
        return replace_method(module, attribute, method, self.journal)

    def remove_method(self, module: nn.Module, attribute: str) -> Reason | None:
        self._change_class(module)
        return remove_method(module, attribute)

    def _change_class(self, module: nn.Module) -> None:
        self.touched |= {(id(module), name) for name in ("__class__", *BOUND_FORWARDS)}
        self._steps.append(functools.partial(set_class, module, type(module)))

    def patch(self, obj: Any, name: str, value: Any) -> None:
        self.touched.add((id(obj), name))
        current = patch_of(obj, name)
        if current is None:
            current = Patch.on(obj, name, value)
            current.apply()
        elif current.value is not value:
            raise PatchConflict(f"{current.where} already carries another kernel, for a model that is still alive")
        if self.journal not in current.claims:
            current.claims.add(self.journal)
            self.journal.patches.append(current)
            self._steps.append(functools.partial(self._give_up, current))

    def undo_patch(self, patch_: Patch) -> list[Reason]:
        """Gives up an earlier patch of this journal as part of the call."""
        self._steps.append(functools.partial(self._claim_again, patch_))
        return self._give_up(patch_)

    def _give_up(self, patch_: Patch) -> list[Reason]:
        self.journal.patches.remove(patch_)
        return _release(self.journal, [patch_])

    def _claim_again(self, patch_: Patch) -> None:
        if not patch_.claims:
            patch_.apply()
        patch_.claims.add(self.journal)
        self.journal.patches.append(patch_)

    def rollback(self, to: int = 0) -> list[Reason]:
        """Takes back the steps after the first ``to``, last first; says what could not be."""
        left: list[Reason] = []
        while len(self._steps) > to:
            left += self._steps.pop()() or []
        return left


_active: contextvars.ContextVar[Transaction | None] = contextvars.ContextVar("twinkle_transaction", default=None)


@contextlib.contextmanager
def transaction(journal: Journal) -> Iterator[Transaction]:
    """Makes a transaction the active one; an exception rolls it back and goes up, saying what could not be taken back."""
    current = Transaction(journal)
    token = _active.set(current)
    try:
        yield current
    except BaseException as error:
        for reason in current.rollback():
            error.add_note(f"twinkle.kernel could not take back: {reason}")
        raise
    finally:
        _active.reset(token)


def active_transaction() -> Transaction | None:
    return _active.get()


def patch(obj: Any, name: str, value: Any) -> None:
    """What a custom installer writes through: sets an attribute of any object, or an item of a mapping.

    The change is in the journal: it is rolled back when the installer raises and undone by :func:`unkernelize`. A
    patch of something process-wide lasts until the last model that asked for it is undone or gone.

    Raises:
        RuntimeError: called outside an installer, or the attribute carries another kernel of a living model.
    """
    current = active_transaction()
    if current is None:
        raise RuntimeError("patch() was called outside kernelize(); it is for installers, which kernelize() runs")
    current.patch(obj, name, value)


@dataclass(frozen=True)
class Undone:
    """What :func:`unkernelize` did.

    Attributes:
        modules: modules that have their original class again.
        patches: attributes that have their original value again.
        not_undone: one reason per change that was left, because somebody else changed the same thing since.
    """

    modules: int = 0
    patches: int = 0
    not_undone: tuple[Reason, ...] = ()


def unkernelize(model: nn.Module) -> Undone:
    """Brings back exactly what was there before the first :func:`~twinkle.kernel.kernelize` of this model.

    A second call does nothing. What somebody else put on top since is left, with a reason in the result and a WARNING.
    A process-wide function returns when the last model that claimed it is undone.

    Args:
        model: the model, one that wraps it, a copy of it, or a part of it.
    """
    journals = journals_of(model)
    not_undone: list[Reason] = []
    modules = 0
    for name, module in model.named_modules():
        if installed_on(type(module)) is None:
            continue
        reason = restore_class(module)
        if reason is None:
            modules += 1
        else:
            not_undone.append(Reason(reason.code, f"{name or 'the model'}: {reason.text}", reason.hint))
    patches = 0
    for journal in journals:
        for owner in [m for m in journal.models if _is_same_model(m, model)]:
            journal.models.discard(owner)
            _journals.pop(owner, None)
        if len(journal.models) == 0:
            claimed = list(journal.patches)
            journal.patches.clear()
            left = _release(journal, claimed)
            not_undone += left
            patches += len(claimed) - len(left)
            journal.rows.clear()
    for reason in not_undone:
        logger.warning("not undone: %s", reason)
    return Undone(modules, patches, tuple(not_undone))


def _is_same_model(owner: nn.Module, model: nn.Module) -> bool:
    """Whether undoing ``model`` undoes all of ``owner``: it contains it, or is what a wrapper without weights wraps."""
    if any(module is owner for module in model.modules()):
        return True
    inside = {id(parameter) for parameter in model.parameters()}
    return any(module is model for module in owner.modules()) and all(id(p) in inside for p in owner.parameters())


def enter_model(model: nn.Module) -> Journal:
    """The journal that a ``kernelize`` call on this model writes to."""
    journals = journals_of(model)
    return journals[0] if journals else Journal()


def register_model(model: nn.Module, journal: Journal) -> None:
    _journals[model] = journal
    journal.models.add(model)


@contextlib.contextmanager
def kernelized(model: nn.Module, mapping: Any = None, **options: Any) -> Iterator[nn.Module]:
    """``with kernelized(model): …``: :func:`~twinkle.kernel.kernelize` on entry, :func:`unkernelize` on exit."""
    from twinkle.kernel.core import kernelize

    kernelize(model, mapping, **options)
    try:
        yield model
    finally:
        unkernelize(model)
