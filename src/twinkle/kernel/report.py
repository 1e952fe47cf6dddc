"""The report on a model: what a mapping would do to it, and what has been done to it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from twinkle.kernel.report_text import short
from twinkle.kernel.rows import STATES, Report, Row, Tried, Uncovered
from twinkle.platforms import PLATFORMS, platform_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twinkle.kernel.reclass import Method
    from twinkle.kernel.targets import Site

__all__ = ["STATES", "Report", "Row", "Tried", "Uncovered", "plan", "report", "short"]


def plan(model: nn.Module, mapping: Any = None, *, device: torch.device | str | None = None) -> Report:
    """What ``kernelize(model, mapping)`` would do. Nothing is changed and no hub kernel is fetched.

    Args:
        model: may be on the meta device.
        mapping: as for :func:`~twinkle.kernel.kernelize`.
        device: the device to plan for; the model's own when None.
    """
    from twinkle.kernel.journal import lock
    from twinkle.kernel.plan import make_plan  # not at the top: torch is imported when there is a model to look at

    with lock:
        made = make_plan(model, mapping, device=device, fetch=False)
    where = made.index.device
    return Report(made.rows(), made.uncovered(), str(where), planned=True, device_here=_is_here(where.type))


def _is_here(device_type: str) -> bool:
    """Whether this machine has a device of that type; of those that no platform has, the meta device say, all."""
    known = {platform.device_type for platform in PLATFORMS.values()}
    return device_type not in known or platform_of(device_type) is not None


_HIDDEN = "of the modules have got a forward of their own since, which runs instead"
_OVERTAKEN = "was changed in its class since: these modules run the kernel in its place; kernelize again to decide anew"


_CHANGED = "of the modules have been changed since and compute something else than the kernel: kernelize again"


def _computes_something_else(site: Site, method: Method, probed: dict[Any, Any]) -> bool:
    """Whether a module isn't what its kernel was loaded for any more: it got another activation, say."""
    from twinkle.kernel import registry
    from twinkle.kernel.probe import variant_of

    row = method.row
    own = method in row.serves and row.installer == "default_installer"
    reference = registry.reference_of(row.op) if row.op and own else None
    return reference is not None and variant_of(reference, site, probed) != row.serves[method]


def report(model: nn.Module) -> Report:
    """What is installed on a model now, how often it was called, and what nothing covers.

    Where nothing is, there are no rows, and ``uncovered`` is what the default config wouldn't cover.
    """
    from twinkle.kernel.journal import lock
    from twinkle.kernel.targets import check_model

    check_model(model, "report")
    with lock:
        return _report(model)


def _report(model: nn.Module) -> Report:
    from twinkle.kernel.journal import journals_of
    from twinkle.kernel.plan import make_plan
    from twinkle.kernel.reclass import installed_on, own_forward, peel
    from twinkle.kernel.targets import ModelIndex, Site
    from twinkle.kernel.uncovered import uncovered_of

    index = ModelIndex.of(model, None)
    live: Counter[Row] = Counter()
    hidden: Counter[Row] = Counter()
    overtaken: dict[Row, set[str]] = {}
    changed: Counter[Row] = Counter()
    probed: dict[Any, Any] = {}
    for module in model.modules():
        installed = installed_on(type(module))
        for attribute, method in installed.methods.items() if installed else ():
            live[method.row] += 1
            hidden[method.row] += attribute == "forward" and own_forward(module) is not None
            if installed and getattr(installed.origin, attribute, None) is not method.original:
                overtaken.setdefault(method.row, set()).add(f"{peel(installed.origin).__qualname__}.{attribute}")
            elif installed:
                site = Site(module, "", peel(installed.origin), attribute, method.original, index.device, index.dtype)
                changed[method.row] += _computes_something_else(site, method, probed)
    noted = [row for journal in journals_of(model) for row in journal.rows]
    by_method = {method.row for journal in journals_of(model) for method in journal.methods.values()}
    rows = []
    # A row that a later call's replaced may still serve the modules which that call didn't reach.
    for row in [*(row for row in live if row not in noted), *noted]:
        if row.state == "installed" and row.scope == "model" and row in by_method:
            if not live[row]:  # a later call put something else there
                continue
            # An installer may count as one place what it changes on several modules.
            told = live[row] if row.installer == "default_installer" else row.instances or live[row]
            row.instances = min(told, live[row])
        gone = [patch for patch in row.patches if patch.owner is not None and patch.claimed and not patch.in_place]
        seen = [f"{patch.where} was replaced by somebody else since" for patch in gone]
        if hidden[row]:
            seen.append(f"{hidden[row]} {_HIDDEN}")
        if changed[row]:
            seen.append(f"{changed[row]} {_CHANGED}")
        seen += [f"{method} {_OVERTAKEN}" for method in sorted(overtaken.get(row, ()))]
        row.notes[:] = [note for note in row.notes if note not in row.seen] + seen
        row.seen = seen
        rows.append(row)
    if not rows:
        return Report([], make_plan(model, fetch=False).uncovered(), str(index.device))
    covered = {place for row in rows for place in row.covers}
    return Report(rows, uncovered_of(index, covered), str(index.device))
