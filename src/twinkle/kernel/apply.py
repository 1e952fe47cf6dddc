"""Doing what a plan says: entry by entry, all or nothing, with the rows of what became of it."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from twinkle.kernel.chain import Pick
from twinkle.kernel.entry import EntryPlan, implementation_of
from twinkle.kernel.install import Assignment, default_installer
from twinkle.kernel.journal import (
    Journal,
    JournalRow,
    Patch,
    PatchConflict,
    Refused,
    enter_model,
    patch_of,
    register_model,
)
from twinkle.kernel.outside import changed_outside, snapshot
from twinkle.kernel.plan import Plan
from twinkle.kernel.reclass import Method, installed_on
from twinkle.kernel.report_text import short
from twinkle.kernel.targets import Site
from twinkle.kernel.transaction import NOT_TAKEN_BACK, Transaction, transaction
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("twinkle.kernel")

Group = list[tuple[Site, Pick]]


def apply_plan(plan: Plan, *, strict: bool = False, verify: bool = False) -> None:
    """Does what a plan says, all or nothing.

    Args:
        plan: made for the model as it is now.
        strict: raise when an entry of the caller's own is not installed at all its sites, or a target is missing.
        verify: rule out the kernels that are numerically off first; with ``strict``, also raise when an entry of the
            caller's own can't be verified.

    Raises:
        ValueError: ``strict`` isn't met; nothing was changed.
        Exception: what an installer raised, after everything was taken back; its notes say what could not be, and the
            model's report has a row ``failed`` about it.
    """
    if strict:
        _demand_all(plan.rows())
    if verify:
        for entry in plan.entries:
            if entry.state is None:
                entry.verify()
        if strict:
            _demand_all(plan.rows())
            _demand_verified(plan)
    journal = enter_model(plan.model)
    rows: list[JournalRow] = []
    at: EntryPlan | None = None
    try:
        with transaction(journal) as current:
            for entry in plan.entries:
                at = entry
                rows += _apply_entry(plan, entry, current)
            at = None
            current.carry_journal(plan.model)
            if strict:
                _demand_all(rows)
    except BaseException as error:
        if at is not None:
            _record(plan, journal, [_failed_row(at, error)])
        raise
    _record(plan, journal, rows)
    _log(rows)
    _warn_of_unverified(plan, rows)


_REMEDIES = {"unused": "; leave the entry out for this model, or call kernelize without strict"}
"""What to do about a row that strict doesn't take, where its reasons don't say it."""


def _demand_all(rows: Iterable[JournalRow]) -> None:
    for row in rows:
        wanted = not row.default and row.state != "overridden"
        if row.state != "installed" and (wanted or row.state == "missing"):
            remedy = _REMEDIES.get(row.state, "")
            raise ValueError(f"strict: {row.target} is not installed: {row.state}: {row.why() or 'no reason'}{remedy}")


def _demand_verified(plan: Plan) -> None:
    for entry in plan.entries:
        for note in entry.unverified_notes if entry.picks and not entry.default else ():
            raise ValueError(f"strict: {entry.label} can't be verified: {note}; leave out verify, or strict")


def _failed_row(entry: EntryPlan, error: BaseException) -> JournalRow:
    row = entry.row("failed")
    row.notes += [str(Reason.of_error(error, "failed", row.installer)), "what the call had installed was taken back"]
    row.notes += [note for note in getattr(error, "__notes__", ()) if note.startswith(NOT_TAKEN_BACK)]
    return row


def _record(plan: Plan, journal: Journal, rows: list[JournalRow]) -> None:
    register_model(plan.model, journal)
    said = {row.target for row in rows}
    journal.rows[:] = [row for row in journal.rows if row.target not in said] + rows


def _apply_entry(plan: Plan, entry: EntryPlan, current: Transaction) -> list[JournalRow]:
    """Installs one entry's picks and gives the rows of what became of it."""
    if entry.state is not None:
        return entry.rows()
    rows: list[JournalRow] = []
    for backend, group in entry.groups().items():
        earlier, fresh = _split_by_earlier(entry, backend, group, current.journal)
        rows += earlier
        if fresh:
            rows.append(_install_group(plan, entry, backend, fresh, current))
    if entry.left or not rows:
        left = entry.left_row()
        for site in entry.left:
            reason = _undo_earlier(site, current)
            left.notes += [] if reason is None or str(reason) in left.notes else [str(reason)]
        rows.append(left)
    return rows


def _recipe(entry: EntryPlan, backend: str) -> tuple[Any, ...]:
    """What must be equal for an earlier call's work to be left alone; for each site also what it computes."""
    return (entry.op or entry.value, backend, entry.installer)


def _split_by_earlier(entry: EntryPlan, backend: str, group: Group, journal: Journal) -> tuple[list[JournalRow], Group]:
    """The rows of sites where an earlier call installed the very same, and the sites that are to be installed."""
    rows: list[JournalRow] = []
    fresh = []
    for site, pick in group:
        what = _at(site, journal)
        row = _row_of(what, journal)
        is_there = row is not None and all(patch.owner is not None and patch.in_place for patch in row.patches)
        is_same = row is not None and row.recipe == _recipe(entry, backend) and row.serves.get(what) == site.variant
        if row is not None and is_there and is_same:
            if row not in rows:
                rows.append(row)
        else:
            fresh.append((site, pick))
    compared = {site.variant for site, _ in group} if entry.is_verified(group) else set()
    for row in rows:
        row.verified = row.verified or set(row.serves.values()) <= compared
    if fresh and entry.installer is not default_installer:
        return [], group  # an installer of somebody's own is called for the whole model
    return rows, fresh


def _at(site: Site, journal: Journal) -> Method | Patch | None:
    """What is installed at a site now, by this call or an earlier one; of a logical name's places, at the first."""
    methods = (installed_on(type(module)).methods[name] for module, name in _earlier_methods(site, journal))  # type: ignore[union-attr]
    return next(methods, None) or next(iter(_earlier_patches(site, journal)), None)


def _row_of(what: Method | Patch | None, journal: Journal) -> JournalRow | None:
    """The row of the earlier call that installed it."""
    if isinstance(what, Method):
        return what.row
    return next((row for row in journal.rows if what in row.patches), None)


def _earlier_methods(site: Site, journal: Journal) -> list[tuple[nn.Module, str]]:
    """The replaced methods at a site; of a logical name's, all that its installer replaced."""
    if site.module is None and site.is_place:
        return []
    modules = list(journal.modules) if site.module is None else [site.module]
    return [
        (module, name)
        for module in modules
        if (installed := installed_on(type(module))) is not None
        for name, method in installed.methods.items()
        if (method.row.target == site.name if site.module is None else name == site.attribute)
    ]


def _earlier_patches(site: Site, journal: Journal) -> list[Patch]:
    """The attribute patches of this model at a site; of a logical name's, all that its installer made."""
    if not site.is_place:
        rows = [row for row in journal.rows if row.target == site.name]
        return [patch for row in rows for patch in row.patches if patch in journal.patches]
    patch = patch_of(site.owner if site.module is None else site.module, site.attribute)
    return [patch] if patch is not None and patch in journal.patches else []


def _undo_earlier(site: Site, current: Transaction) -> Reason | None:
    """Takes off what an earlier call installed at a site that this call claims; returns why it could not.

    What this very call has put there, by the installer of another entry, stays.
    """
    for patch in reversed(_earlier_patches(site, current.journal)):
        if patch.owner is not None and not patch.in_place:
            return Reason("changed-since", f"{patch.where} was replaced by somebody else since")
        current.undo_patch(patch)
    for module, name in _earlier_methods(site, current.journal):
        row = installed_on(type(module)).methods[name].row  # type: ignore[union-attr]
        if row in current.rows and site.module is not None:
            return Reason("conflict", f"it already carries the kernel of {row.target}, of the same mapping")
        reason = current.remove_method(module, name)
        if reason is not None:
            return reason
    return None


def _install_group(plan: Plan, entry: EntryPlan, backend: str, group: Group, current: Transaction) -> JournalRow:
    """Runs the entry's installer, once per distinct implementation."""
    row = entry.row("installed", backend=backend, implementation=implementation_of(group), instances=len(group))
    row.verified = entry.is_verified(group)
    row.recipe = _recipe(entry, backend)
    custom = entry.installer is not default_installer
    start = undone = len(current)
    before = snapshot(plan.model) if custom else {}
    try:
        for site, _ in group:
            reason = _undo_earlier(site, current)
            if reason is not None:
                raise PatchConflict(f"{site.where}: {reason}")
        undone, patched = len(current), len(current.journal.patches)
        current.row = row
        current.rows.append(row)
        counts = _run_installer(plan, entry, backend, group, row, current)
    except BaseException as error:
        # A refused row's sites are the originals, as those of any other; an error takes all back.
        left = [str(reason) for reason in current.rollback(undone if isinstance(error, Refused) else start)]
        left += changed_outside(before, snapshot(plan.model), set()) if custom else []
        for text in left:
            error.add_note(f"{NOT_TAKEN_BACK}{text}")
        if not isinstance(error, Refused):
            raise
        _refuse(row, [str(error), *getattr(error, "__notes__", ())])
        return row
    row.patches = current.journal.patches[patched:]
    row.serves = {_at(site, current.journal): site.variant for site, _ in group}
    if custom:
        outside = changed_outside(before, snapshot(plan.model), current.touched)
        _settle(row, counts, outside, current, undone)
    return row


def _settle(row: JournalRow, counts: list[int | None], outside: list[str], current: Transaction, undone: int) -> None:
    """Writes into the row what an installer of somebody else's did, and takes it back where that was nothing.

    Args:
        counts: what it returned, per implementation.
        outside: what it changed past the transaction, whose steps after the first ``undone`` are its own.
    """
    row.instances = None if None in counts else sum(filter(None, counts))
    if row.instances == 0:
        _refuse(row, ["the installer found no site in this model"])
    elif row.instances is None and len(current) == undone and not outside:
        _refuse(row, ["the installer changed nothing and didn't say on how many sites"])
    if row.state == "refused":
        row.notes += map(str, current.rollback(undone))
        row.patches = []
    elif any(isinstance(p.owner, (type, types.ModuleType, MutableMapping)) for p in row.patches):
        row.scope = "process"
    if outside:
        row.notes.append(f"changed outside patch(), so that undo won't bring it back: {', '.join(outside)}")
        logger.warning("%s: %s %s", short(row.target), row.installer, row.notes[-1])


def _run_installer(
    plan: Plan, entry: EntryPlan, backend: str, group: Group, row: JournalRow, current: Transaction
) -> list[int | None]:
    """Calls the installer; gives what it returned, per implementation."""
    assert entry.chain is not None
    current.assignments = [
        Assignment(site, pick.kernel, pick.impl, row, entry.chain.served_by(backend, site))
        for site, pick in group
        if pick.kernel is not None
    ]
    counts = []
    for impl in {id(pick.impl): pick.impl for _, pick in group}.values():
        count = entry.installer(plan.model, entry.key, impl)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise TypeError(f"{row.installer} returned {count!r}, not how many sites it changed (or None)")
        counts.append(count)
    return counts


def _refuse(row: JournalRow, notes: list[str]) -> None:
    row.state, row.backend, row.implementation, row.instances, row.verified = "refused", None, None, 0, False
    row.notes += notes


def _warn_of_unverified(plan: Plan, rows: list[JournalRow]) -> None:
    """The caller's own entries that were to be compared, couldn't be, and are installed all the same."""
    installed = {(row.target, row.backend) for row in rows if row.state == "installed"}
    for entry in plan.entries:
        for backend, reasons in entry.unverified.items():
            if not entry.default and (entry.label, backend) in installed:
                for reason in reasons:
                    logger.warning("%s: installed, but %s: %s", short(entry.label), backend, reason)


def _log(rows: list[JournalRow]) -> None:
    """One line per row: what the caller asked for and didn't get is a WARNING, what the default skips is DEBUG."""
    for row in rows:
        if row.state == "installed":
            where = "for the whole process" if row.scope == "process" else f"on {row.instances} instances"
            logger.info("%s: %s by %s, %s", short(row.target), row.op or row.implementation, row.backend, where)
        elif row.state != "unused":
            level = logging.DEBUG if row.default or row.state == "overridden" else logging.WARNING
            logger.log(level, "%s: %s: %s", short(row.target), row.state, row.why() or "no reason was given")
    unused = [short(row.target) for row in rows if row.state == "unused" and not row.default]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        logger.warning("this model has nothing that these entries name: %s%s", ", ".join(unused[:5]), more)
