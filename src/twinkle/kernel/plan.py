"""What would be installed where, and why not: pure, so that ``kernelize`` is ``apply(make_plan(…))``.

A plan reads no weight values and changes nothing; it works on the meta device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle.kernel import registry
from twinkle.kernel.chain import Chain, candidates_of
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.entry import EntryPlan
from twinkle.kernel.hub import HubRef
from twinkle.kernel.install import default_installer, kernel_for
from twinkle.kernel.journal import JournalRow
from twinkle.kernel.meant import logical_key_of, meant_by, no_logical_entry
from twinkle.kernel.plugins import load_plugins
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import AskedOnce, KernelChoice
from twinkle.kernel.rows import Uncovered
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
from twinkle.platforms import PLATFORMS, platforms_called
from twinkle.reasons import Reason, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(eq=False)
class Plan:
    """What ``kernelize`` does, before it does it."""

    model: nn.Module
    index: ModelIndex
    entries: list[EntryPlan]

    def rows(self) -> list[JournalRow]:
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
    asked = AskedOnce()
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
    platform = next(iter(platforms_called(kind)), None)
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


def _choose(entry: EntryPlan, asked: AskedOnce, cache: dict[Hashable, Any], fetch: bool) -> None:
    assert entry.target is not None
    index = entry.index
    entry.chain = Chain(entry.target, entry.value, candidates_of(entry.value, asked, fetch), index)
    if entry.logical:
        original = getattr(entry.chain.reference, "original", None)
        site = Site.of_op(entry.label, original, index.device, index.dtype)
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
