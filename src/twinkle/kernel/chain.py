"""The candidates of one entry, asked one after the other for each site."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from twinkle.kernel import registry
from twinkle.kernel.calls import router_of
from twinkle.kernel.hub import HubRef
from twinkle.kernel.install import Kernel, kernel_for
from twinkle.kernel.journal import patch_of
from twinkle.kernel.passed import watched_at
from twinkle.kernel.registry import AskedOnce, KernelChoice, KernelImpl
from twinkle.kernel.rows import Tried
from twinkle.kernel.targets import ModelIndex, Site, Target
from twinkle.kernel.verify import fits_in_place
from twinkle.reasons import Reason

CUSTOM = "custom"
"""The backend's name in the report when the mapping names a class or function itself."""

NOT_FETCHED = object()
"""Stands for a hub kernel while only planning: nothing is downloaded for a plan."""


@dataclass(frozen=True, eq=False)
class Pick:
    """The candidate that a site takes; ``kernel`` is None where a custom installer alone knows what to do with it."""

    backend: str
    impl: Any
    kernel: Kernel | None


Candidates = Iterator[tuple[str, KernelImpl | Reason]]


def candidates_of(value: Any, asked: AskedOnce, fetch: bool) -> Candidates:
    """What a mapping's value offers, best first, lazily: backend -> its implementation, or why it is out.

    Args:
        value: a checked value of a mapping.
        asked: the availability answers so far.
        fetch: load hub kernels; without it they are only named.
    """
    if isinstance(value, KernelChoice):
        for backend in value.backends:
            yield backend, asked.impl_of(value.op, backend)
    elif isinstance(value, HubRef):
        load = value.load if fetch else lambda target, site: NOT_FETCHED
        yield "hub", value.missing() or KernelImpl(load, lambda: (True, None))
    else:
        yield CUSTOM, KernelImpl(lambda target, site: value, lambda: (True, None))


class Chain:
    """The candidates of one entry, best first; each is asked for only when a site needs it.

    Args:
        value: the mapping's value.
        candidates: see :func:`candidates_of`.

    Attributes:
        op: the op that they implement; None for an implementation that the mapping names itself.
        reference: the op's reference, None without one, or the Reason why it can't be imported.
        tried: the candidates asked so far, with their reasons.
        refused: whether a candidate that could be used on this machine didn't take a site.
    """

    def __init__(self, target: Target, value: Any, candidates: Candidates, index: ModelIndex) -> None:
        self.target = target
        self.op = value.op if isinstance(value, KernelChoice) else None
        self.reference = registry.reference_of(self.op) if self.op else None
        self.tried: list[Tried] = []
        self.refused = False
        self._value = value
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
        self._rejected[pick.backend, variant_key(site)] = reason

    def _try(self, backend: str, impl: KernelImpl, site: Site) -> Pick | Reason:
        key = (backend, variant_key(site))
        reason = self._rejected.get(key) or self._why_not(backend, impl, site)
        if reason is not None:
            self.refused = True
            return reason
        if key not in self._loaded:
            self._loaded[key] = registry.load_impl(impl, self.target, site)
        loaded = self._loaded[key]
        if isinstance(loaded, Reason):
            return loaded
        if loaded is NOT_FETCHED or (self.target.kind == "logical" and site.original is None):
            return Pick(backend, loaded, None)
        kernel = kernel_for(self.target, site.original, loaded)
        if self.op is None and isinstance(kernel, Kernel):
            # An op's kernels keep an op's contract; of what the mapping names itself nothing is known yet.
            kernel = fits_in_place(site, kernel) or kernel
        if isinstance(kernel, Reason):
            self.refused = True
            return kernel
        if site.module is not None and self.op is not None:
            kernel = replace(kernel, watched=watched_at(site, self.reference))
        return Pick(backend, loaded, kernel)

    def served_by(self, backend: str, site: Site) -> tuple[Any, ...]:
        """What two models must agree on to share a process-wide function; the backend's name is second."""
        return (self.op or self._value, backend, site.variant)

    def _why_not(self, backend: str, impl: KernelImpl, site: Site) -> Reason | None:
        """Why a candidate that is there doesn't fit a site, as far as that shows before loading it."""
        if isinstance(site.variant, Reason):
            return site.variant
        if site.module is None:
            taken = _taken_elsewhere(site, self.served_by(backend, site), self._index)
            if taken is not None:
                return taken
        return registry.refusal(impl, site)


def variant_key(site: Site) -> Hashable:
    """Sites that share a loaded implementation; without an op, what is checked depends on the class and device."""
    return site.variant if site.variant is not None else (site.owner, site.dtype, site.device)


def _taken_elsewhere(site: Site, served_by: tuple[Any, ...], index: ModelIndex) -> Reason | None:
    """Why a process-wide function can't get this kernel: it serves another living model with another one."""
    patch = patch_of(site.owner, site.attribute)
    if patch is None or all(journal in index.journals for journal in patch.claims):
        return None
    router = router_of(patch.value)
    if router is not None:
        serving = router.served_by
    else:  # what a custom installer put there; two models may share it
        rows = (row for journal in patch.claims for row in journal.rows if patch in row.patches)
        serving = next((row.recipe for row in rows), ())
    if serving[:2] == served_by[:2]:
        return None
    by = f"backend {serving[1]}" if serving else "another kernel"
    return Reason(
        "taken",
        f"{site.name} is process-wide and already serves another model with {by}",
        "unkernelize that model first, or let both use the same backend",
    )
