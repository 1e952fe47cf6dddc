"""One entry of a mapping while it is planned: its sites, the candidates that they take, and the rows that it makes."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from twinkle.kernel import registry
from twinkle.kernel.chain import NOT_FETCHED, Chain, Pick, variant_key
from twinkle.kernel.install import default_installer, obstacle
from twinkle.kernel.journal import JournalRow, patch_of
from twinkle.kernel.rows import Tried
from twinkle.kernel.targets import ModelIndex, Site, Target
from twinkle.kernel.verify import check_site, unverified
from twinkle.reasons import Reason

logger = logging.getLogger("twinkle.kernel")


@dataclass(eq=False)
class EntryPlan:
    """One entry of a mapping, and what is to become of it.

    Attributes:
        default: whether it is the default config's own entry.
        label: the key as text.
        state: decided before any candidate was asked (missing, unused, overridden), else None.
        reason: why, for those.
        sites: the sites that this entry owns.
        lost: the sites that another entry owns, with that entry.
        picks: the candidate of each site; sites without one are in ``left``, with ``obstacles`` where no candidate
            was asked.
        failed: whether verification ruled a candidate out.
        verified: what verification found equal to the original (see :func:`_judged_as`).
        unverified: the backends that it couldn't compare, and why.
    """

    key: Any
    value: Any
    default: bool
    label: str
    index: ModelIndex
    op: str | None = None
    target: Target | None = None
    state: str | None = None
    reason: Reason | None = None
    sites: list[Site] = field(default_factory=list)
    lost: list[tuple[Site, EntryPlan]] = field(default_factory=list)
    chain: Chain | None = None
    picks: list[tuple[Site, Pick]] = field(default_factory=list)
    left: list[Site] = field(default_factory=list)
    obstacles: dict[Reason, int] = field(default_factory=dict)
    installer: Any = default_installer
    failed: bool = False
    verified: set[Hashable] = field(default_factory=set)
    unverified: dict[str, list[Reason]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def logical(self) -> bool:
        return self.target is not None and self.target.kind == "logical"

    @property
    def scope(self) -> str:
        """What installing it changes, as far as that is known beforehand."""
        if self.target is None or self.target.kind in ("class", "method"):
            return "model"
        own = self.op is not None and self.installer is registry.get_op(self.op).installer
        return registry.get_op(self.op).scope if own and self.op else "process"

    def choose(self, sites: list[Site]) -> None:
        """Fills ``picks`` and ``left`` for some of the entry's sites."""
        assert self.chain is not None
        for site in sites:
            blocked = None if self._patched_by_us(site) else obstacle(site)
            if blocked is not None:
                self.obstacles[blocked] = self.obstacles.get(blocked, 0) + 1
                self.left.append(site)
                continue
            pick = self.chain.pick(site)
            if pick is None:
                self.left.append(site)
            else:
                self.picks.append((site, pick))

    def _patched_by_us(self, site: Site) -> bool:
        """Whether an installer of an earlier call on this model patched the very place, which this call will undo."""
        patch = None if site.module is None else patch_of(site.module, site.attribute)
        return patch is not None and all(journal in self.index.journals for journal in patch.claims)

    def verify(self) -> None:
        """Compares each picked kernel with the original; what is off is ruled out and the next candidate chosen."""
        assert self.chain is not None
        checked: dict[Hashable, Reason | None] = {}
        while True:
            again = []
            for site, pick in self.picks:
                key = _judged_as(site, pick)
                if key not in checked:
                    checked[key] = self._check(site, pick)
                reason = checked[key]
                if reason is not None:
                    self.chain.reject(pick, site, reason)
                    again.append((site, pick))
            if not again:
                return
            self.failed = True
            self.picks = [pair for pair in self.picks if pair not in again]
            self.choose([site for site, _ in again])

    def _check(self, site: Site, pick: Pick) -> Reason | None:
        if pick.kernel is None:
            reason: Reason | None = unverified("its own installer puts it in place")
        else:
            reason = check_site(site, pick.kernel, self.op)
        if reason is not None and reason.code == "unverified":
            known = self.unverified.setdefault(pick.backend, [])
            known += [] if reason in known else [reason]
            return None
        if reason is None:
            self.verified.add(_judged_as(site, pick))
        else:
            logger.warning("%s: %s is not installed: %s", self.label, pick.backend, reason)
        return reason

    def is_verified(self, group: list[tuple[Site, Pick]]) -> bool:
        """Whether each pick of a group was compared with the original, and agreed."""
        return all(_judged_as(site, pick) in self.verified for site, pick in group)

    def groups(self) -> dict[str, list[tuple[Site, Pick]]]:
        """The picks by backend."""
        grouped: dict[str, list[tuple[Site, Pick]]] = {}
        for site, pick in self.picks:
            grouped.setdefault(pick.backend, []).append((site, pick))
        return grouped

    def row(self, state: str, **fields: Any) -> JournalRow:
        """A report row of this entry."""
        return JournalRow(
            target=self.label,
            op=self.op,
            state=state,
            installer=str(getattr(self.installer, "__name__", getattr(self.installer, "path", self.installer))),
            scope=self.scope,
            tried=list(self.chain.tried) if self.chain else [],
            notes=[*self.notes, *self.unverified_notes, *([str(self.reason)] if self.reason else [])],
            default=self.default,
            covers=self.covers,
            **fields,
        )

    @property
    def unverified_notes(self) -> list[str]:
        return [f"{backend}: {reason}" for backend, reasons in self.unverified.items() for reason in reasons]

    @property
    def covers(self) -> frozenset[tuple[Any, str]]:
        """The (class or Python module, attribute) of all sites that the entry names."""
        return frozenset((site.owner, site.attribute) for site in (*self.sites, *(site for site, _ in self.lost)))

    def rows(self) -> list[JournalRow]:
        """One row per backend that got sites, plus one for the sites left."""
        if self.state is not None:
            return [self.row(self.state, instances=len(self.lost))]
        rows = []
        for backend, group in self.groups().items():
            instances = None if self.logical else len(group)  # how many its installer will find, it alone knows
            rows.append(
                self.row("installed", backend=backend, implementation=implementation_of(group), instances=instances)
            )
        return rows if rows and not self.left else [*rows, self.left_row()]

    def left_row(self) -> JournalRow:
        """The row of the sites that nothing is installed at."""
        assert self.chain is not None
        refused = self.chain.refused or self.obstacles
        state = "failed" if self.failed else "refused" if refused else "kept"
        row = self.row(state, instances=0 if self.logical else len(self.left))
        if self.obstacles:
            row.tried = [Tried("any", dict(self.obstacles)), *row.tried]
        return row


def _judged_as(site: Site, pick: Pick) -> Hashable:
    """Picks that one comparison speaks for: a kernel may be right in one dtype or on one device only."""
    return (pick.backend, variant_key(site), site.dtype, site.device)


def implementation_of(group: list[tuple[Site, Pick]]) -> str:
    """The qualified names of what serves a group of sites."""
    return ", ".join(sorted({pick.kernel.name if pick.kernel else _name_of(pick.impl) for _, pick in group}))


def _name_of(impl: Any) -> str:
    if impl is NOT_FETCHED:
        return "a hub kernel that is not fetched for a plan"
    named = impl if hasattr(impl, "__qualname__") else type(impl)
    return f"{named.__module__}.{named.__qualname__}"
