"""Ops and backends of other distributions, found by their entry points."""

from __future__ import annotations

import contextlib
import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle.kernel import registry
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("twinkle.kernel")

ENTRY_POINT_GROUP = "twinkle.kernel_ops"


@dataclass(frozen=True)
class Declared:
    """A plug-in as its distribution's metadata declares it.

    Attributes:
        name, value: of the entry point.
        distribution, version: of what brings it; None where the metadata don't say.
    """

    name: str
    value: str
    distribution: str | None
    version: str | None


def declared() -> list[Declared]:
    """The plug-ins that are installed, loaded or not; nothing of them is imported."""
    return [
        Declared(entry.name, entry.value, *((entry.dist.name, entry.dist.version) if entry.dist else (None, None)))
        for entry in _entry_points()
    ]


_loaded: set[tuple[str, str]] = set()
_errors: dict[tuple[str, str], Reason] | None = None
_scanning = False


def load_plugins(refresh: bool = False) -> dict[tuple[str, str], Reason]:
    """Scans the entry points of ``twinkle.kernel_ops`` (once, unless ``refresh``) and calls what they name.

    An entry point names a function without arguments that registers ops or backends. Of a broken one nothing stays
    registered. One that builds on another's op may come before it.

    Returns:
        the ones that could not be loaded, by name and value (two distributions may use a name), with the reason.
    """
    from importlib.metadata import MetadataPathFinder

    global _errors, _scanning
    if _errors is None or (refresh and not _scanning):
        importlib.import_module("twinkle.kernel.ops")  # ours first: what a plug-in raises on must not take them along
        if refresh:
            importlib.invalidate_caches()
            MetadataPathFinder().invalidate_caches()  # before Python 3.12 the line above leaves these
        _errors, _scanning = {}, True  # a plug-in that asks for an unknown op starts no scan of its own
        try:
            _errors = _load_plugins()
        finally:
            _scanning = False
    return dict(_errors)


def _load_plugins() -> dict[tuple[str, str], Reason]:
    pending = [entry for entry in _entry_points() if (entry.name, entry.value) not in _loaded]
    while True:
        failed = [(entry, error) for entry in pending if (error := _load_plugin(entry)) is not None]
        if len(failed) == len(pending):
            break
        pending = [entry for entry, _ in failed]  # those that have loaded may have brought what these lack
    for entry, error in failed:
        logger.warning("%s (entry point %s = %s)", error, entry.name, entry.value)
    return {(entry.name, entry.value): error for entry, error in failed}


def _entry_points() -> list[EntryPoint]:
    """All entry points of our group; a distribution whose metadata can't be read doesn't hide the others'."""
    from importlib.metadata import distributions, entry_points

    try:
        return list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:
        found: dict[EntryPoint, None] = {}
        for distribution in distributions():
            with contextlib.suppress(Exception):
                found |= dict.fromkeys(e for e in distribution.entry_points if e.group == ENTRY_POINT_GROUP)
        return list(found)


def _load_plugin(entry: EntryPoint) -> Reason | None:
    """Lets one plug-in register; what it registered is taken back when it raises."""
    implementations = {name: dict(op.implementations) for name, op in registry._OPS.items()}
    derived = dict(registry._EVERY_OP)
    try:
        register = entry.load()
        if not callable(register):
            raise TypeError(f"{entry.value} is a {type(register).__name__}, not a function that registers")
        register()
    except (Exception, SystemExit) as error:  # somebody else's package must not take us down
        for name in registry._OPS.keys() - implementations.keys():
            del registry._OPS[name]
        for name, known in implementations.items():
            registry._OPS[name].implementations = known
        registry._EVERY_OP.clear()
        registry._EVERY_OP.update(derived)
        return Reason.of_error(error, "broken-plugin", f"plug-in {entry.name}")
    _loaded.add((entry.name, entry.value))
    return None
