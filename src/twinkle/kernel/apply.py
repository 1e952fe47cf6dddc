"""Doing what a plan says: entry by entry, all or nothing, with the rows of what became of it."""

from __future__ import annotations

import logging

from twinkle.kernel.install import Assignment, changed_outside, default_installer, snapshot
from twinkle.kernel.plan import EntryPlan, Pick, Plan, served_by, served_by_key
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.report import Row, short
from twinkle.kernel.targets import Site
from twinkle.kernel.undo import PatchConflict, Transaction, enter_model, patch_of, register_model, transaction

logger = logging.getLogger("twinkle.kernel")


def _demand_all(entries: list[EntryPlan]) -> None:
    for entry in entries:
        for row in entry.rows():
            wanted = not entry.default and row.state != "overridden"
            if row.state != "installed" and (wanted or row.state == "missing"):
                raise ValueError(f"strict: {short(row.target)} is not installed: {row.state}: {row.why() or 'no reason'}")


def apply_plan(plan: Plan, *, strict: bool = False, verify: bool = False) -> None:
    """Does what a plan says, all or nothing.

    Args:
        plan: made for the model as it is now.
        strict: raise before anything is changed when an entry of the caller's own would not be installed.
        verify: rule out the kernels that are numerically off first.

    Raises:
        ValueError: ``strict`` isn't met.
        Exception: what an installer raised, after everything was taken back.
    """
    if strict:
        _demand_all(plan.entries)
    if verify:
        for entry in plan.entries:
            if entry.state is None:
                entry.verify(plan.index)
        if strict:
            _demand_all(plan.entries)
    journal = enter_model(plan.model)
    rows: list[Row] = []
    with transaction(journal) as current:
        for entry in plan.entries:
            rows += _apply_entry(plan, entry, current)
    register_model(plan.model, journal)
    claimed = {row.target for row in rows}
    journal.rows[:] = [row for row in journal.rows if row.target not in claimed and row not in rows] + rows
    _log(rows)


def _apply_entry(plan: Plan, entry: EntryPlan, current: Transaction) -> list[Row]:
    """Installs one entry's picks and gives the rows of what became of it."""
    if entry.state is not None:
        return entry.rows()
    rows: list[Row] = []
    for site in entry.left:
        _undo_earlier(site, current)
    for backend, group in entry.groups().items():
        earlier, fresh = _split_by_earlier(entry, backend, group)
        rows += earlier
        if not fresh:
            continue
        row = entry.row("installed", backend=backend, implementation=served_by(fresh), instances=len(fresh))
        before = len(current)
        try:
            for site, _ in fresh:
                _undo_earlier(site, current)
            _install_group(plan, entry, backend, fresh, row, current)
        except PatchConflict as conflict:
            left = current.rollback(before)
            row.state, row.backend, row.implementation = "refused", None, None
            row.notes += [str(conflict), *map(str, left)]
        rows.append(row)
    if entry.left or not rows:
        rows.append(entry.left_row())
    return rows


def _split_by_earlier(
    entry: EntryPlan, backend: str, group: list[tuple[Site, Pick]]
) -> tuple[list[Row], list[tuple[Site, Pick]]]:
    """The rows of sites where an earlier call installed the very same, and the sites that are to be installed."""
    rows: list[Row] = []
    fresh = []
    for site, pick in group:
        row = _earlier_row(site)
        planned = entry.row("installed", backend=backend, implementation=served_by([(site, pick)]))
        if row is not None and all(
            getattr(row, name) == getattr(planned, name) for name in ("op", "backend", "installer", "implementation")
        ):
            if row not in rows:
                rows.append(row)
        else:
            fresh.append((site, pick))
    return rows, fresh


def _earlier_row(site: Site) -> Row | None:
    if site.module is None:
        return None
    installed = installed_on(type(site.module))
    method = installed.methods.get(site.attribute) if installed else None
    return method.row if method else None


def _undo_earlier(site: Site, current: Transaction) -> None:
    """Takes off what an earlier call installed at a site that this call claims."""
    if site.module is None:
        patch = patch_of(site.owner, site.attribute)
        if patch is not None and current.journal in patch.claims:
            current.undo_patch(patch)
    elif _earlier_row(site) is not None:
        reason = current.remove_method(site.module, site.attribute)
        if reason is not None:
            raise PatchConflict(f"{site.name}: {reason}")


def _install_group(
    plan: Plan, entry: EntryPlan, backend: str, group: list[tuple[Site, Pick]], row: Row, current: Transaction
) -> None:
    """Runs the entry's installer, once per distinct implementation."""
    current.assignments = [
        Assignment(site, pick.kernel, pick.impl, row, served_by_key(entry.op, backend, site))
        for site, pick in group
        if pick.kernel is not None
    ]
    custom = entry.installer is not default_installer
    before = snapshot(plan.model) if custom else {}
    counts = [
        entry.installer(plan.model, entry.key, impl) for impl in {id(pick.impl): pick.impl for _, pick in group}.values()
    ]
    if not custom:
        return
    row.instances = None if None in counts else sum(counts)
    if row.instances == 0:
        row.state, row.backend, row.implementation = "refused", None, None
        row.notes.append("the installer found no site in this model")
    outside = changed_outside(before, snapshot(plan.model), current.touched)
    if outside:
        row.notes.append(f"changed outside the journal, so undo won't bring it back: {', '.join(outside)}")


def _log(rows: list[Row]) -> None:
    """One line per row: what the caller asked for and didn't get is a WARNING, what the default config skips is DEBUG."""
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
