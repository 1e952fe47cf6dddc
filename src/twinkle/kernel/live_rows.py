"""The rows of what is installed on a model, with what has happened to its modules since."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.kernel import registry
from twinkle.kernel.journal import JournalRow
from twinkle.kernel.plan import make_plan
from twinkle.kernel.probe import variant_of
from twinkle.kernel.reclass import Method, installed_on, own_forward, peel
from twinkle.kernel.rows import Report, Row
from twinkle.kernel.targets import ModelIndex, Site
from twinkle.kernel.uncovered import uncovered_of

if TYPE_CHECKING:
    from torch import nn

HIDDEN = "of the modules have got a forward of their own since, which runs instead"
CHANGED = "of the modules have been changed since and compute something else than the kernel: kernelize again"
OVERTAKEN = "was changed in its class since: these modules run the kernel in its place; kernelize again to decide anew"


@dataclass
class _Modules:
    """What has become of the modules that a row counts.

    Attributes:
        live: how many carry its method.
        hidden: how many of them have a forward of their own.
        changed: how many of them aren't what the kernel was loaded for any more.
        overtaken: the methods in whose place it runs that have another code now.
    """

    live: int = 0
    hidden: int = 0
    changed: int = 0
    overtaken: set[str] = field(default_factory=set)

    def notes(self) -> Iterator[str]:
        if self.hidden:
            yield f"{self.hidden} {HIDDEN}"
        if self.changed:
            yield f"{self.changed} {CHANGED}"
        yield from (f"{method} {OVERTAKEN}" for method in sorted(self.overtaken))


def report_of(model: nn.Module) -> Report:
    """See :func:`twinkle.kernel.report.report`."""
    index = ModelIndex.of(model, None)
    modules = _modules_by_row(model, index)
    noted = [row for journal in index.journals for row in journal.rows]
    of_methods = {method.row for journal in index.journals for method in journal.methods.values()}
    # A row that a later call's replaced may still serve the modules which that call didn't reach.
    known = [*(row for row in modules if row not in noted), *noted]
    found = [(row, now) for row in known if (now := _now(row, modules[row], row in of_methods)) is not None]
    if not found:
        return Report([], make_plan(model, fetch=False).uncovered(), str(index.device))
    covered = {place for row, _ in found for place in row.covers}
    return Report([now for _, now in found], uncovered_of(index, covered), str(index.device))


def _modules_by_row(model: nn.Module, index: ModelIndex) -> defaultdict[JournalRow, _Modules]:
    found: defaultdict[JournalRow, _Modules] = defaultdict(_Modules)
    probed: dict[Any, Any] = {}
    for module in model.modules():
        installed = installed_on(type(module))
        if installed is None:
            continue
        origin = peel(installed.origin)
        for attribute, method in installed.methods.items():
            of_row = found[method.row]
            of_row.live += 1
            of_row.hidden += attribute == "forward" and own_forward(module) is not None
            if getattr(installed.origin, attribute, None) is not method.original:
                of_row.overtaken.add(f"{origin.__qualname__}.{attribute}")
            else:
                site = Site(module, "", origin, attribute, method.original, index.device, index.dtype)
                of_row.changed += _computes_something_else(site, method, probed)
    return found


def _computes_something_else(site: Site, method: Method, probed: dict[Any, Any]) -> bool:
    """Whether a module isn't what its kernel was loaded for any more: it got another activation, say."""
    row = method.row
    own = method in row.serves and row.installer == "default_installer"
    reference = registry.reference_of(row.op) if row.op and own else None
    return reference is not None and variant_of(reference, site, probed) != row.serves[method]


def _now(row: JournalRow, modules: _Modules, of_methods: bool) -> Row | None:
    """A row as it is now, which goes on counting; None when a later call has put something else everywhere."""
    instances = row.instances
    if row.state == "installed" and row.scope == "model" and of_methods:
        if not modules.live:
            return None
        # An installer may count as one place what it changes on several modules.
        told = modules.live if row.installer == "default_installer" else instances or modules.live
        instances = min(told, modules.live)
    gone = [patch for patch in row.patches if patch.owner is not None and patch.claimed and not patch.in_place]
    replaced = [f"{patch.where} was replaced by somebody else since" for patch in gone]
    return row.told(instances=instances, notes=[*row.notes, *replaced, *modules.notes()])
