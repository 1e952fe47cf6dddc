"""What would be installed where, and why not: pure, so that ``kernelize`` is ``apply(make_plan(…))``.

A plan reads no weight values and changes nothing; it works on the meta device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.kernel import registry
from twinkle.kernel.chain import NOT_FETCHED, Chain, Pick, candidates_of, variant_key
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.hub import HubRef
from twinkle.kernel.install import default_installer, kernel_for, obstacle
from twinkle.kernel.journal import patch_of
from twinkle.kernel.meant import logical_key_of, meant_by, no_logical_entry
from twinkle.kernel.plugins import load_plugins
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import Availability, KernelChoice
from twinkle.kernel.rows import Row, Tried, Uncovered
from twinkle.kernel.targets import (
    ModelIndex,
    Site,
    Target,
    Unresolved,
    check_model,
    describe,
    holders_of,
    resolve_target,
)
from twinkle.kernel.uncovered import uncovered_of
from twinkle.kernel.verify import check_site, unverified
from twinkle.platforms import PLATFORMS
from twinkle.reasons import Reason, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

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

    def row(self, state: str, **fields: Any) -> Row:
        """A report row of this entry."""
        return Row(
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

    def rows(self) -> list[Row]:
        """One row per backend that got sites, plus one for the sites left."""
        if self.state is not None:
            return [self.row(self.state, instances=len(self.lost))]
        rows = []
        for backend, group in self.groups().items():
            instances = None if self.logical else len(group)  # how many its installer will find, it alone knows
            rows.append(self.row("installed", backend=backend, implementation=served_by(group), instances=instances))
        return rows if rows and not self.left else [*rows, self.left_row()]

    def left_row(self) -> Row:
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


def served_by(group: list[tuple[Site, Pick]]) -> str:
    """The qualified names of what serves a group of sites."""
    return ", ".join(sorted({pick.kernel.name if pick.kernel else _name_of(pick.impl) for _, pick in group}))


def _name_of(impl: Any) -> str:
    if impl is NOT_FETCHED:
        return "a hub kernel that is not fetched for a plan"
    named = impl if hasattr(impl, "__qualname__") else type(impl)
    return f"{named.__module__}.{named.__qualname__}"


@dataclass(eq=False)
class Plan:
    """What ``kernelize`` does, before it does it."""

    model: nn.Module
    index: ModelIndex
    entries: list[EntryPlan]

    def rows(self) -> list[Row]:
        """The report rows, as they will be when everything installs."""
        return [row for entry in self.entries for row in entry.rows()]

    def uncovered(self) -> list[Uncovered]:
        """The norms, gated MLPs and rotary functions of the model that no entry covers."""
        return uncovered_of(self.index, {place for entry in self.entries for place in entry.covers})


def make_plan(model: Any, mapping: Any = None, *, device: torch.device | str | None = None, fetch: bool = True) -> Plan:
    """Plans ``kernelize(model, mapping)``.

    Args:
        model: an ``nn.Module``; read only.
        mapping: see :func:`twinkle.kernel.kernelize`; None means the default config.
        device: the device to plan for; the model's own when None.
        fetch: load hub kernels; without it they are only named.

    Raises:
        ValueError: the model is no module, the mapping no mapping, or an entry is wrong in itself; nothing was changed.
    """
    check_model(model, "kernelize")
    if mapping is None:
        mapping = DEFAULT_KERNEL_CONFIG
    elif not isinstance(mapping, Mapping):
        is_value = isinstance(mapping, (KernelChoice, HubRef)) or callable(mapping)
        hint = "; write {target: …}" if is_value else ""
        raise ValueError(f"mapping must map targets to what replaces them, got {describe(mapping)}{hint}")
    load_plugins()
    index = ModelIndex.of(model, _device(device))
    entries = [_entry(key, value, index) for key, value in mapping.items()]
    _settle_claims(entries)
    asked = Availability()
    cache: dict[Hashable, Any] = {}
    for entry in entries:
        if entry.state is None:
            _choose(entry, asked, cache, fetch)
    return Plan(model, index, entries)


def _device(device: torch.device | str | None) -> torch.device | None:
    import torch

    if not isinstance(device, str):
        try:
            return None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
    kind, colon, index = device.partition(":")
    platform = next((p for p in PLATFORMS.values() if kind in (p.name, *p.aliases, p.device_type)), None)
    try:
        return torch.device(device if platform is None else platform.device_type + colon + index)
    except RuntimeError as error:
        if platform is not None and (index.isdigit() or not colon):
            text = f"PyTorch knows no device {platform.device_type!r} here: {platform.missing()}"
        else:
            names = [name for p in PLATFORMS.values() for name in (p.device_type, p.name, *p.aliases)]
            text = f"no such device{did_you_mean(kind, names)}"
        raise ValueError(f"device={device!r}: {text}") from error


def _entry(key: Any, value: Any, index: ModelIndex) -> EntryPlan:
    default = DEFAULT_KERNEL_CONFIG.get(key) is value
    if not isinstance(value, (KernelChoice, HubRef)) and not callable(value):
        wanted = "a KernelChoice, a class, a function or hub(…)"
        raise ValueError(f"{key!r:.120}: what replaces a target is {wanted}, got {describe(value)}")
    try:
        target = resolve_target(key, importing=not default)
    except ValueError as error:
        meant = meant_by(key, index)
        if meant is None:
            raise
        raise ValueError(meant) from error
    entry = EntryPlan(key, value, default, target.label, index)
    if isinstance(value, KernelChoice):
        entry.op = value.op
        entry.installer = value.installer or registry.get_op(value.op).installer or default_installer
    elif isinstance(value, HubRef):
        entry.notes.append(f"from {value}")
    if isinstance(target, Unresolved):
        entry.state, entry.reason = target.state, target.reason
        return entry
    entry.target = target
    if target.kind == "logical":
        if not isinstance(value, KernelChoice) or entry.installer is default_installer:
            raise ValueError(no_logical_entry(key, value, index))
        concerns = registry.get_op(value.op).concerns
        modules = (module for found in index.by_class.values() for _, module in found)
        if concerns is not None and not any(map(concerns, modules)):
            entry.state = "unused"
            entry.reason = None if default else Reason("unused", "nothing in this model is what its op serves")
        return entry
    if not isinstance(value, (KernelChoice, HubRef)):
        _check_direct_kind(target, value)
    logical = logical_key_of(value)
    if logical is not None:
        raise ValueError(f"{target.label}: op {entry.op} finds its places by itself: write the key {logical!r} instead")
    entry.sites = index.sites(target)
    if not entry.sites:
        entry.state = "unused"
        what = "runs code of its Python module" if target.kind == "function" else "has an instance of it"
        entry.reason = None if default else Reason("unused", f"nothing in this model {what}")
    return entry


def _check_direct_kind(target: Target, value: Any) -> None:
    """The mistakes that hold for any site: a class for a function, a function for a class, a class that is no layer."""
    from torch import nn

    if isinstance(value, nn.Module) and target.kind != "function":
        raise ValueError(f"{target.label}: got an instance of {type(value).__qualname__}; give the class itself")
    found = kernel_for(target, target.original, value)
    if isinstance(found, Reason) and found.code in ("kind", "signature"):
        raise ValueError(f"{target.label}: {found}")


def _settle_claims(entries: list[EntryPlan]) -> None:
    """Gives every site one owner. The default config's own entries yield; two of the user's own are an error."""
    owners: dict[tuple[int, str], EntryPlan] = {}
    for entry in entries:
        for site in entry.sites:
            other = owners.setdefault(site.place, entry)
            if other is entry:
                continue
            if not entry.default and not other.default:
                claims = " and ".join(describe(e.key) for e in (other, entry))
                raise ValueError(f"two entries claim {site.where}: {claims}; keep one of them")
            if other.default and not entry.default:
                owners[site.place] = entry
    for entry in entries:
        entry.lost = [(s, owners[s.place]) for s in entry.sites if owners[s.place] is not entry]
        entry.sites = [s for s in entry.sites if owners[s.place] is entry]
        winners = ", ".join(sorted({winner.label for _, winner in entry.lost}))
        if entry.lost and not entry.sites:
            entry.state = "overridden"
            entry.reason = Reason("overridden", f"the mapping's own entry {winners} owns its sites")
        elif entry.lost:
            entry.notes.append(f"{len(entry.lost)} sites belong to {winners}")


def _choose(entry: EntryPlan, asked: Availability, cache: dict[Hashable, Any], fetch: bool) -> None:
    assert entry.target is not None
    index = entry.index
    entry.chain = Chain(entry.target, entry.value, candidates_of(entry.value, asked, fetch), index)
    if entry.logical:
        # Not a place, but what the candidates are told: the device and dtype, and whose installer will ask for more.
        original = getattr(entry.chain.reference, "original", None)
        site = Site(None, entry.label, None, entry.label, original, index.device, index.dtype)
        if original is not None:
            site = dataclasses.replace(site, variant=variant_of(entry.chain.reference, site, cache))
        entry.choose([site])
        return
    if entry.chain.reference is not None:
        entry.sites = [
            dataclasses.replace(site, variant=variant_of(entry.chain.reference, site, cache)) for site in entry.sites
        ]
    entry.choose(entry.sites)
    for site, _ in entry.picks:
        if site.module is None and (holders := holders_of(site)):
            entry.notes.append(f"these hold the original by an import and keep calling it: {', '.join(holders)}")
