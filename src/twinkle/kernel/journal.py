"""What is installed, written down: one journal per model, and the replaced attributes of the process.

A journal belongs to one model, whoever wraps it; a deep copy of the model gets its own. Replaced attributes may be
process-wide, so several journals can claim one: the original returns with the last claim.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from twinkle.kernel.calls import router_of
from twinkle.kernel.reclass import CONTAINERS, Method, installed_on
from twinkle.kernel.rows import Row
from twinkle.reasons import Reason

ABSENT = object()
"""Stands for the value of an attribute that an object doesn't have."""

lock = threading.RLock()
"""Held while models and the process are looked at to be changed, changed, or reported on: two threads may kernelize
one model, or two models that share a function."""


class Journal:
    """What one model carries. It dies with the model's last re-classed part.

    Attributes:
        classes: the generated classes, by what they are made of.
        methods: the installed methods, by what they are made of, so that equal instances share a class.
        rows: the report rows of what was planned and installed.
        patches: the attribute patches that this journal claims.
        modules: the modules whose class was replaced.
        models: the models that ``kernelize`` was called with; several when a model was wrapped in between.
    """

    def __init__(self) -> None:
        self.classes: dict[tuple[Any, ...], type] = {}
        self.methods: dict[tuple[Any, ...], Method] = {}
        self.rows: list[JournalRow] = []
        self.patches: list[Patch] = []
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # When the last model that claims a process-wide patch is gone, the original returns.
        weakref.finalize(self, _release_orphans, self.patches).atexit = False

    def for_copy(self, memo: dict[Any, Any]) -> Journal:
        """The journal of what ``copy.deepcopy`` is making, going by its memo.

        A copied model claims for itself what its original claims, so that either can be undone or die alone; they count
        their calls together. What is patched on a module of the original stays the original's alone. A copied part
        (peft copies single layers) stays in the journal of its model.
        """
        owners = [model for model in self.models if id(model) in memo]
        if not owners:
            return self
        key = ("twinkle.kernel", id(self))
        if key not in memo:
            twin = memo[key] = Journal()
            twin.methods.update(self.methods)
            twin.rows += self.rows
            for patch in self.patches:
                if not patch.on_module:
                    twin.claim(patch)
        for model in owners:
            register_model(memo[id(model)], memo[key])
        return memo[key]

    def claim(self, patch: Patch) -> None:
        """Wants a patch to stay."""
        patch.claims.add(self)
        self.patches.append(patch)


@dataclass(eq=False)
class JournalRow(Row):
    """A report row with what later calls and reports have to know of what it tells.

    Attributes:
        covers: the (class or Python module, attribute) of the sites that the entry names.
        patches: the attributes that its installer replaced.
        recipe: what must be equal for a later call to leave the row's work alone.
        serves: what was installed -> the variant of the sites that it serves.
    """

    covers: frozenset[tuple[Any, str]] = frozenset()
    patches: list[Patch] = field(default_factory=list)
    recipe: tuple[Any, ...] = ()
    serves: dict[Method | Patch | None, Any] = field(default_factory=dict)

    def told(self, **since: Any) -> Row:
        """The row of a report, which goes on counting; ``since`` is what has become of it."""
        return Row(**{each.name: getattr(self, each.name) for each in fields(Row)} | since)


_journals: weakref.WeakKeyDictionary[nn.Module, Journal] = weakref.WeakKeyDictionary()


def journals_of(model: nn.Module) -> list[Journal]:
    """The journals of whatever is installed on a model or its parts."""
    found: dict[int, Journal] = {}
    for module in model.modules():
        journal = _journals.get(module)
        installed = installed_on(type(module))
        for known in (journal, installed and installed.journal):
            if known:
                found[id(known)] = known
    return list(found.values())


def enter_model(model: nn.Module) -> Journal:
    """The journal that a ``kernelize`` call on this model writes to."""
    journals = journals_of(model)
    return journals[0] if journals else Journal()


def register_model(model: nn.Module, journal: Journal) -> None:
    """Makes a model known as carrying a journal."""
    _journals[model] = journal
    journal.models.add(model)


def forget_model(model: nn.Module, journal: Journal) -> None:
    """Takes back :func:`register_model`."""
    journal.models.discard(model)
    _journals.pop(model, None)


class Refused(RuntimeError):
    """What an installer raises to say why it can't install anything: a row of the report, no failure."""


class PatchConflict(Refused):
    """An attribute already carries another kernel, for a model that is still alive."""


@dataclass(eq=False)
class Patch:
    """One replaced attribute (or item of a mapping), and the journals that want it so.

    Attributes:
        holder: the object, or a weak reference to it where it is a module: a model must be able to die while patched.
        key: where the patch is found: (id of the object, name).
        value: what was put there.
        original: what was there; ``ABSENT`` for nothing.
    """

    holder: Any
    key: tuple[int, str]
    value: Any
    original: Any
    claims: weakref.WeakSet[Journal] = field(default_factory=weakref.WeakSet)

    @classmethod
    def on(cls, obj: Any, name: str, value: Any) -> Patch:
        """A patch of ``obj``, not applied yet."""
        holder = weakref.ref(obj) if isinstance(obj, nn.Module) else obj
        return cls(holder, (id(obj), name), value, _read(obj, name))

    @property
    def on_module(self) -> bool:
        return isinstance(self.holder, weakref.ref)

    @property
    def name(self) -> str:
        return self.key[1]

    @property
    def owner(self) -> Any:
        return self.holder() if self.on_module else self.holder

    @property
    def where(self) -> str:
        owner = self.owner
        if isinstance(owner, MutableMapping):  # has no name: that of what was there says which one it is
            was = getattr(self.original, "__qualname__", type(self.original).__qualname__)
            return f"the entry {self.name!r} ({was})"
        return f"{getattr(owner, '__name__', type(owner).__name__)}.{self.name}"

    @property
    def claimed(self) -> bool:
        # Not the set's length: it still counts the dead for a moment.
        return any(True for _ in self.claims)

    @property
    def in_place(self) -> bool:
        """Whether the value is still what we put there."""
        return self.owner is not None and _read(self.owner, self.name) is self.value

    def apply(self) -> None:
        """Puts the value there."""
        _write(self.owner, self.name, self.value)
        _patches[self.key] = self
        _set_active(self.value, True)

    def restore(self) -> Reason | None:
        """Puts the original back where the value is still ours; otherwise says why not."""
        _set_active(self.value, False)
        if _patches.get(self.key) is self:
            del _patches[self.key]
        if self.owner is None:
            return None
        if _read(self.owner, self.name) is not self.value:
            return Reason("changed-since", f"{self.where} was replaced by somebody else")
        _write(self.owner, self.name, self.original)
        return None


_patches: dict[tuple[int, str], Patch] = {}


def patch_of(obj: Any, name: str) -> Patch | None:
    """The live patch on an attribute, if there is one."""
    found = _patches.get((id(obj), name))
    return found if found is not None and found.owner is obj else None  # an id is used again after a death


def release(journal: Journal, patches: list[Patch]) -> list[Reason]:
    """Gives up the journal's claims; what nobody claims any more is restored."""
    reasons = []
    for claimed in reversed(patches):
        claimed.claims.discard(journal)
        reasons.append(None if claimed.claimed else claimed.restore())
    return [reason for reason in reasons if reason]


def _release_orphans(patches: list[Patch]) -> None:
    for orphan in reversed(patches):
        if not orphan.claimed and _patches.get(orphan.key) is orphan:
            orphan.restore()


@contextlib.contextmanager
def process_originals() -> Iterator[None]:
    """Within it every replaced attribute has its original value, for all threads: to judge a kernel by its original."""
    with lock:
        suspended = [patch for patch in list(_patches.values()) if patch.owner is not None and patch.restore() is None]
        try:
            yield
        finally:
            for patch in suspended:
                if patch.claimed and patch.owner is not None:
                    patch.apply()


def _set_active(value: Any, active: bool) -> None:
    """A router that somebody still holds after the undo passes every call on to the original."""
    router = router_of(value)
    if router is not None:
        router.active = active


def _read(holder: Any, name: str) -> Any:
    if isinstance(holder, MutableMapping):
        return holder.get(name, ABSENT)
    if isinstance(holder, nn.Module):
        for container in CONTAINERS:
            if name in vars(holder)[container]:
                return vars(holder)[container][name]
    return vars(holder).get(name, ABSENT)


def _write(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        if value is ABSENT:
            del holder[name]
        else:
            holder[name] = value
    elif value is ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
