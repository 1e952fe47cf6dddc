"""What would be installed where, and why not: pure, so that ``kernelize`` is ``apply(make_plan(…))``.

A plan reads no weight values and changes nothing; it works on the meta device.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.kernel import registry
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.hub import HubRef
from twinkle.kernel.install import Kernel, default_installer, kernel_for, obstacle
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import KernelChoice, KernelImpl
from twinkle.kernel.report import Row, Tried, Uncovered
from twinkle.kernel.targets import (
    ModelIndex,
    Site,
    Target,
    Unresolved,
    holders_of,
    resolve_target,
)
from twinkle.kernel.undo import patch_of
from twinkle.kernel.verify import check_site, fits_in_place
from twinkle.reasons import Reason

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("twinkle.kernel")

CUSTOM = "custom"
"""The backend's name in the report when the mapping names a class or function itself."""


@dataclass(frozen=True, eq=False)
class Pick:
    """The candidate that a site takes."""

    backend: str
    impl: Any
    kernel: Kernel | None


class Chain:
    """The candidates of one entry, best first; each is asked for only when a site needs it.

    Args:
        op: the op that they implement; None for an implementation that the mapping names itself.
        candidates: backend -> its implementation, or why it is out; lazily.
    """

    def __init__(
        self, target: Target, op: str | None, candidates: Iterator[tuple[str, KernelImpl | Reason]], index: ModelIndex
    ) -> None:
        self.target = target
        self.op = op
        self.reference = registry.get_op(op).load_reference() if op else None
        self.tried: list[Tried] = []
        self.any_available = False
        self._index = index
        self._rest = candidates
        self._known: list[tuple[str, KernelImpl | Reason]] = []
        self._loaded: dict[tuple[str, Hashable], Any] = {}
        self._rejected: dict[tuple[str, Hashable], Reason] = {}

    def _candidates(self) -> Iterator[tuple[Tried, KernelImpl | Reason]]:
        position = 0
        while True:
            if position == len(self._known):
                candidate = next(self._rest, None)
                if candidate is None:
                    return
                self._known.append(candidate)
                self.tried.append(Tried(candidate[0]))
                if isinstance(candidate[1], Reason):
                    self.tried[-1].reasons[candidate[1]] = 0
                else:
                    self.any_available = True
            yield self.tried[position], self._known[position][1]
            position += 1

    def pick(self, site: Site) -> Pick | None:
        """The first candidate that is there, accepts the site and loads; the others' reasons are in ``tried``."""
        for tried, impl in self._candidates():
            if isinstance(impl, Reason):
                continue
            found = self._try(tried.backend, impl, site)
            if isinstance(found, Pick):
                return found
            tried.reasons[found] = tried.reasons.get(found, 0) + 1
        return None

    def reject(self, pick: Pick, site: Site, reason: Reason) -> None:
        """Rules a candidate out for all sites of that variant, e.g. because it failed verification."""
        self._rejected[pick.backend, _variant_key(site)] = reason

    def _try(self, backend: str, impl: KernelImpl, site: Site) -> Pick | Reason:
        key = (backend, _variant_key(site))
        if key in self._rejected:
            return self._rejected[key]
        if isinstance(site.variant, Reason):
            return site.variant
        if site.module is None:
            taken = _taken_elsewhere(site, served_by_key(self.op, backend, site), self._index)
            if taken:
                return taken
        if impl.accepts is not None:
            try:
                refused = impl.accepts(site)
            except Exception as error:
                return Reason.of_error(error, "refused", "accepts()")
            if refused is not None:
                return Reason.of(refused, "refused")
        if key not in self._loaded:
            self._loaded[key] = registry.load_impl(impl, self.target, site)
        loaded = self._loaded[key]
        if isinstance(loaded, Reason):
            return loaded
        if self.target.kind == "logical" or loaded is NOT_FETCHED:
            return Pick(backend, loaded, None)
        kernel = kernel_for(self.target, site.original, loaded)
        if isinstance(kernel, Reason):
            return kernel
        if self.op is None:
            unfit = fits_in_place(site, kernel, self._index)
            if unfit:
                return unfit
        return Pick(backend, loaded, kernel)


NOT_FETCHED = object()
"""Stands for a hub kernel while only planning: nothing is downloaded for a plan."""


def _variant_key(site: Site) -> Hashable:
    """Sites that share a loaded implementation; without an op, what is checked depends on the class and device."""
    return site.variant if site.variant is not None else (site.owner, site.dtype, site.device)


def served_by_key(op: str | None, backend: str, site: Site) -> tuple[Any, ...]:
    """What two models must agree on to share a process-wide function."""
    return (op, backend, site.variant)


def _taken_elsewhere(site: Site, served_by: tuple[Any, ...], index: ModelIndex) -> Reason | None:
    """Why a process-wide function can't get this kernel: it serves another living model with another one."""
    patch = patch_of(site.owner, site.attribute)
    if patch is None or all(journal in index.journals for journal in patch.claims):
        return None
    router = getattr(patch.value, "twinkle_router", None)
    if router is not None and router.served_by == served_by:
        return None
    by = f"backend {router.served_by[1]}" if router is not None else "another patch"
    return Reason("taken", f"{site.name} is process-wide and already serves another model with {by}")


@dataclass(eq=False)
class EntryPlan:
    """One entry of a mapping, and what is to become of it.

    Attributes:
        state: decided before any candidate was asked (missing, unused, overridden), else None.
        reason: why, for those.
        sites: the sites that this entry owns.
        picks: the candidate of each site; sites without one are in ``left``, with ``obstacles`` where no candidate
            was asked.
        failed: whether verification ruled a candidate out.
    """

    key: Any
    value: Any
    default: bool
    label: str
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
    notes: list[str] = field(default_factory=list)

    @property
    def process_wide(self) -> bool:
        return self.target is not None and self.target.kind in ("function", "logical")

    def choose(self, sites: list[Site]) -> None:
        """Fills ``picks`` and ``left`` for some of the entry's sites."""
        assert self.chain is not None
        for site in sites:
            blocked = obstacle(site)
            if blocked is not None:
                self.obstacles[blocked] = self.obstacles.get(blocked, 0) + 1
                self.left.append(site)
                continue
            pick = self.chain.pick(site)
            if pick is None:
                self.left.append(site)
            else:
                self.picks.append((site, pick))

    def verify(self, index: ModelIndex) -> None:
        """Compares each picked kernel with the original; what is off is ruled out and the next candidate chosen."""
        assert self.chain is not None
        checked: dict[tuple[str, Hashable], Reason | None] = {}
        while True:
            again = []
            for site, pick in self.picks:
                key = (pick.backend, _variant_key(site))
                if key not in checked and pick.kernel is not None:
                    checked[key] = check_site(site, pick.kernel, self.op, index)
                reason = checked.get(key)
                if reason is not None:
                    self.chain.reject(pick, site, reason)
                    again.append((site, pick))
            if not again:
                return
            self.failed = True
            self.picks = [pair for pair in self.picks if pair not in again]
            self.choose([site for site, _ in again])

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
            installer=getattr(self.installer, "__name__", None) or getattr(self.installer, "path", str(self.installer)),
            scope="process" if self.process_wide else "model",
            tried=list(self.chain.tried) if self.chain else [],
            notes=[*self.notes, *([str(self.reason)] if self.reason else [])],
            default=self.default,
            **fields,
        )

    def rows(self) -> list[Row]:
        """One row per backend that got sites, plus one for the sites left."""
        if self.state is not None:
            return [self.row(self.state, instances=len(self.lost))]
        rows = [
            self.row("installed", backend=backend, implementation=served_by(group), instances=len(group))
            for backend, group in self.groups().items()
        ]
        if self.left:
            rows.append(self.left_row())
        elif self.target is not None and self.target.kind == "logical" and not self.picks:
            rows.append(self.left_row())
        return rows

    def left_row(self) -> Row:
        assert self.chain is not None
        refused = self.chain.any_available or self.obstacles
        row = self.row("failed" if self.failed else "refused" if refused else "kept", instances=len(self.left))
        if self.obstacles:
            row.tried = [Tried("any", dict(self.obstacles)), *row.tried]
        return row


def served_by(group: list[tuple[Site, Pick]]) -> str:
    """The qualified names of what serves a group of sites."""
    names = {pick.kernel.name if pick.kernel else f"{type(pick.impl).__name__}" for _, pick in group}
    return ", ".join(sorted(names))


@dataclass(eq=False)
class Plan:
    """What ``kernelize`` does, before it does it."""

    model: nn.Module
    index: ModelIndex
    entries: list[EntryPlan]
    explicit: bool

    def rows(self) -> list[Row]:
        """The report rows, as they will be when everything installs."""
        return [row for entry in self.entries for row in entry.rows()]

    def uncovered(self) -> list[Uncovered]:
        """The norms, gated MLPs and rotary functions of the model that no entry covers."""
        return uncovered_of(self.index, {e.label for e in self.entries if e.sites or e.lost})


def make_plan(
    model: Any, mapping: Any = None, *, device: torch.device | str | None = None, fetch: bool = True
) -> Plan:
    """Plans ``kernelize(model, mapping)``.

    Args:
        model: an ``nn.Module``; read only.
        mapping: see :func:`twinkle.kernel.kernelize`; None means the default config.
        device: the device to plan for; the model's own when None.
        fetch: load hub kernels; without it they are only named.

    Raises:
        ValueError: the model is no module, the mapping no mapping, or an entry is wrong in itself; nothing was changed.
    """
    import torch
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = "; give an instance" if isinstance(model, type) else ""
        raise ValueError(f"kernelize needs an nn.Module, got {_describe(model)}{hint}")
    if mapping is None:
        entries: Mapping[Any, Any] = DEFAULT_KERNEL_CONFIG
    elif isinstance(mapping, Mapping):
        entries = mapping
    else:
        hint = "; wrap it as {target: it}" if isinstance(mapping, (KernelChoice, HubRef, type)) else ""
        raise ValueError(f"mapping must be a mapping of targets to kernels, got {_describe(mapping)}{hint}")
    registry.load_plugins()
    index = ModelIndex.of(model, None if device is None else torch.device(device))
    plan = Plan(model, index, [], explicit=mapping is not None and mapping is not DEFAULT_KERNEL_CONFIG)
    for key, value in entries.items():
        plan.entries.append(_entry(key, value, index))
    _settle_claims(plan.entries)
    availability: dict[Any, Reason | None] = {}
    cache: dict[Hashable, Any] = {}
    for entry in plan.entries:
        if entry.state is None:
            _choose(entry, index, availability, cache, fetch)
    return plan


def _describe(value: Any) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"{type(value).__name__} {value!r:.80}"


def _entry(key: Any, value: Any, index: ModelIndex) -> EntryPlan:
    default = isinstance(key, Hashable) and DEFAULT_KERNEL_CONFIG.get(key) is value
    if not isinstance(value, (KernelChoice, HubRef)) and not callable(value):
        raise ValueError(
            f"{key!r}: a mapping's value must be a KernelChoice, a class, a function or hub(…), got {_describe(value)}"
        )
    target = resolve_target(key, importing=not default)
    entry = EntryPlan(key, value, default, target.label)
    if isinstance(value, KernelChoice):
        entry.op = value.op
        entry.installer = value.installer or registry.get_op(value.op).installer or default_installer
    if isinstance(target, Unresolved):
        entry.state, entry.reason = target.state, target.reason
        return entry
    entry.target = target
    if target.kind == "logical":
        if not isinstance(value, KernelChoice) or entry.installer is default_installer:
            logical = [name for name, op in registry.ops().items() if op.installer is not None]
            raise ValueError(
                f"{key!r} is a logical name (it has no dot), which needs a KernelChoice whose op has an installer "
                f"({', '.join(logical)}) or that brings one; a class or function is named by its dotted path"
            )
        return entry
    if isinstance(value, type) is False and callable(value) and not isinstance(value, (KernelChoice, HubRef)):
        _check_direct_kind(target, value)
    elif isinstance(value, type):
        _check_direct_kind(target, value)
    entry.sites = index.sites(target)
    if not entry.sites:
        entry.state = "unused"
        what = "runs code of its Python module" if target.kind == "function" else "has an instance of it"
        entry.reason = None if default else Reason("unused", f"nothing in this model {what}")
    return entry


def _check_direct_kind(target: Target, value: Any) -> None:
    """The mistakes that hold for any site: a class for a function, a function for a class, a class that is no layer."""
    if not callable(target.original):
        return
    found = kernel_for(target, target.original, value)
    if isinstance(found, Reason) and found.code in ("kind", "signature"):
        raise ValueError(f"{target.label}: {found}")


def _settle_claims(entries: list[EntryPlan]) -> None:
    """Gives every site one owner. The default config's own entries yield; two of the user's own are an error."""
    owners: dict[tuple[int, str], tuple[Site, EntryPlan]] = {}
    for entry in entries:
        for site in entry.sites:
            if site.place not in owners:
                owners[site.place] = (site, entry)
                continue
            other = owners[site.place][1]
            if not entry.default and not other.default:
                raise ValueError(
                    f"two entries claim {site.name or 'the model'}.{site.attribute}: {other.label!r} and "
                    f"{entry.label!r}; keep one of them"
                )
            if other.default and not entry.default:
                owners[site.place] = (site, entry)
    for entry in entries:
        entry.lost = [(s, owners[s.place][1]) for s in entry.sites if owners[s.place][1] is not entry]
        entry.sites = [s for s in entry.sites if owners[s.place][1] is entry]
        winners = sorted({winner.label for _, winner in entry.lost})
        if entry.lost and not entry.sites:
            entry.state = "overridden"
            entry.reason = Reason("overridden", f"the mapping's own entry {', '.join(winners)} owns its sites")
        elif entry.lost:
            entry.notes.append(f"{len(entry.lost)} sites belong to {', '.join(winners)}")


def _choose(
    entry: EntryPlan, index: ModelIndex, availability: dict[Any, Reason | None], cache: dict[Hashable, Any], fetch: bool
) -> None:
    assert entry.target is not None
    entry.chain = Chain(entry.target, entry.op, _candidates(entry.value, availability, fetch), index)
    if entry.target.kind == "logical":
        site = Site(None, entry.label, index, entry.label, None, index.device, index.dtype)
        pick = entry.chain.pick(site)
        if pick is not None:
            entry.picks.append((site, pick))
        return
    if entry.chain.reference is not None:
        entry.sites = [
            dataclasses.replace(site, variant=variant_of(entry.chain.reference, site, cache)) for site in entry.sites
        ]
    entry.choose(entry.sites)
    for site, _ in entry.picks:
        if site.module is None and (holders := holders_of(site)):
            entry.notes.append(f"these hold the original by an import and keep calling it: {', '.join(holders)}")


def _candidates(value: Any, availability: dict[Any, Reason | None], fetch: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, KernelChoice):
        for backend in value.backends:
            impl = registry.get_impl(value.op, backend)
            if not isinstance(impl, Reason):
                # One question per backend and call, whatever the number of entries.
                if impl.available not in availability:
                    availability[impl.available] = registry.availability(impl)
                impl = availability[impl.available] or impl
            yield backend, impl
    elif isinstance(value, HubRef):
        missing = value.missing()
        load = value.load if fetch else lambda target, site: NOT_FETCHED
        yield "hub", missing or KernelImpl(load, lambda: (True, None))
    else:
        yield CUSTOM, KernelImpl(lambda target, site: value, lambda: (True, None))


PROBED_OPS = ("rms_norm", "gated_rms_norm", "swiglu", "geglu")


def uncovered_of(index: ModelIndex, covered: set[str]) -> list[Uncovered]:
    """The norms, gated MLPs and rotary functions of a model that no covered target names.

    Args:
        index: the model.
        covered: labels of the targets that entries of the mapping have.
    """
    found = []
    cache: dict[Hashable, Any] = {}
    for cls, instances in index.by_class.items():
        label = f"{cls.__module__}.{cls.__qualname__}"
        in_torch = cls.__module__.partition(".")[0] == "torch"
        bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__ if base.__dict__.get("forward")}
        if in_torch or any(name in covered or f"{name}.forward" in covered for name in {label, *bases}):
            continue
        name, module = instances[0]
        site = index.site(name, module, cls, "forward")
        for op in PROBED_OPS:
            variant = variant_of(registry.get_op(op).load_reference(), site, cache)
            if not isinstance(variant, Reason):
                target = label if op == "rms_norm" else f"{label}.forward"
                found.append(Uncovered(target, len(instances), op, str(variant)))
                break
        else:
            if _looks_like_norm_or_mlp(cls, module):
                found.append(Uncovered(label, len(instances), reason="no op computes what it does"))
    return found + _uncovered_functions(index, covered, cache)


def _looks_like_norm_or_mlp(cls: type, module: nn.Module) -> bool:
    name = cls.__name__.lower()
    return (name.endswith("norm") and bool(module._parameters)) or name.endswith("mlp")


def _uncovered_functions(index: ModelIndex, covered: set[str], cache: dict[Hashable, Any]) -> list[Uncovered]:
    import sys

    found = []
    reference = registry.get_op("rotary").load_reference()
    for python_module in sorted(index.python_modules):
        functions = {name for name in vars(sys.modules[python_module]) if name.startswith("apply_rotary")}
        for name in sorted(functions):
            label = f"{python_module}.{name}"
            if label in covered:
                continue
            target = resolve_target(label)
            if isinstance(target, Unresolved):
                continue
            variant = variant_of(reference, index.sites(target)[0], cache)
            if isinstance(variant, Reason):
                found.append(Uncovered(label, 1, reason=str(variant)))
            else:
                found.append(Uncovered(label, 1, "rotary", str(variant)))
    return found


