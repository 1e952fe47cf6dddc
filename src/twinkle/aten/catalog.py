"""Which operators there are: those that installed distributions name in the entry-point group ``twinkle.aten_ops``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from twinkle.aten.errors import RegistrationError
from twinkle.aten.spec import OperatorSpec
from twinkle.naming import top_package
from twinkle.reasons import Reason, did_you_mean

GROUP = "twinkle.aten_ops"


@dataclass(frozen=True)
class Package:
    """A package with operators, as this process would import it.

    Attributes:
        name: ``ops`` for those of this project; others use that name as well.
        found: its file or folder; None where nothing of the name is on the path.
        operators: those whose entry points name it.
        error: why one of them can't be had from there; None when all can.
    """

    name: str
    found: str | None
    operators: tuple[str, ...]
    error: str | None


def names() -> list[str]:
    """The operators' names; none of them is imported."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUP)})


def chosen(wanted: Sequence[str] = ()) -> list[str]:
    """The names that were asked for; all when none were.

    Raises:
        RegistrationError: all were asked for, and there is none.
    """
    found = list(wanted) or names()
    if not found:
        text = f"no installed distribution has an entry point of the group {GROUP}"
        raise RegistrationError.of("no operators", "unknown-operator", text, "pip install twinkle-kernel")
    return found


def operator(name: str) -> OperatorSpec:
    """An operator by its name.

    Raises:
        RegistrationError: no such operator, or its package can't be had; the message tells why.
    """
    entries = _entries(name)
    if not entries:
        known = names()
        text = f"no such operator; known: {', '.join(known) or 'none'}{did_you_mean(str(name), known)}"
        raise RegistrationError.of(str(name), "unknown-operator", text, _not_installed(str(name)))
    named = sorted({entry.value for entry in entries})
    if len(named) > 1:  # which comes first is a matter of sys.path
        text = f"several entry points of that name: {', '.join(named)}"
        raise RegistrationError.of(name, "foreign-ops", text, "one distribution brings it")
    module, _, attribute = named[0].partition(":")
    try:
        spec = getattr(importlib.import_module(module), attribute)
    except RegistrationError:  # the package was found, and its author told
        raise
    except (Exception, SystemExit) as error:  # whatever a package raises that isn't the one that was meant
        raise RegistrationError(name, _why(module, error)) from error
    if not isinstance(spec, OperatorSpec):
        raise RegistrationError.of(name, "foreign-ops", f"{named[0]} is no OperatorSpec")
    if spec.name != name:  # what is asked for by one name would be registered, counted and closed by another
        text = f"{named[0]} is the OperatorSpec of {spec.name}, which its entry point calls {name}"
        raise RegistrationError.of(name, "foreign-ops", text)
    return spec


def brought_by(name: str) -> str | None:
    """Where an operator comes from, nothing of it being imported; None where no entry point names it."""
    entry = next(iter(_entries(name)), None)
    if entry is None:
        return None
    of = "" if entry.dist is None else f" of the distribution {entry.dist.name}"
    return f"{entry.value}{of}, from {_place(entry.module.partition('.')[0]) or 'a package that is not on the path'}"


def packages() -> list[Package]:
    """All packages that entry points name, the operators in them imported."""
    by_package: dict[str, list[str]] = {}
    for entry in metadata.entry_points(group=GROUP):
        by_package.setdefault(top_package(entry.module), []).append(entry.name)
    return [
        Package(package, _place(package), tuple(sorted(set(of))), _first_error(of))
        for package, of in sorted(by_package.items())
    ]


def _entries(name: str) -> list[metadata.EntryPoint]:
    return [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]


def _place(package: str) -> str | None:
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module that somebody has put into sys.modules by hand
        found = None
    if found is None:
        return None
    return found.origin or next(iter(found.submodule_search_locations or ()), None)


def _not_installed(operator: str) -> str | None:
    """Where an operator's folder lies beside known ones, though no entry point names it: it was made just now."""
    for package in sorted({top_package(entry.module) for entry in metadata.entry_points(group=GROUP)}):
        try:
            found = importlib.util.find_spec(f"{package}.{operator}") if operator.isidentifier() else None
        except (ImportError, ValueError):  # a foreign package of that name
            continue
        if found is not None:
            return f"{found.origin} is there, but no entry point names it: pip install -e . --no-deps"
    return None


def _first_error(operators: Sequence[str]) -> str | None:
    for name in operators:
        try:
            operator(name)
        except RegistrationError as error:
            return str(error)
    return None


def _why(module: str, error: BaseException) -> Reason:
    """``ops`` is a name that others use as well: another package of that name may come first on the path."""
    top = top_package(module)
    where = _place(top) or "anywhere on sys.path"
    hint = f"another package {top} may come first on sys.path; `twinkle-kernel info` shows which one is found"
    return Reason("foreign-ops", f"{module} can't be had from {where}: {type(error).__name__}: {error}", hint)
