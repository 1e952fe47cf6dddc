"""Which operators there are: those that installed distributions name in the entry-point group ``twinkle.aten_ops``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib import metadata

from twinkle.aten.errors import RegistrationError
from twinkle.aten.spec import OperatorSpec
from twinkle.reasons import Reason, did_you_mean

GROUP = "twinkle.aten_ops"


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
        raise RegistrationError("no operators", Reason("unknown-operator", text, "pip install twinkle-kernel"))
    return found


def operator(name: str) -> OperatorSpec:
    """An operator by its name.

    Raises:
        RegistrationError: no such operator, or its package can't be had; the message tells why.
    """
    entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]
    if not entries:
        known = names()
        text = f"no such operator; known: {', '.join(known) or 'none'}{did_you_mean(name, known)}"
        raise RegistrationError(name, Reason("unknown-operator", text))
    module, _, attribute = entries[0].value.partition(":")
    try:
        spec = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RegistrationError(name, _why(module, error)) from error
    if not isinstance(spec, OperatorSpec):
        raise RegistrationError(name, Reason("foreign-ops", f"{entries[0].value} is no OperatorSpec"))
    return spec


def _why(module: str, error: Exception) -> Reason:
    """``ops`` is a name that others use as well: another package of that name may come first on the path."""
    top = module.partition(".")[0]
    try:
        found = importlib.import_module(top)
    except ImportError:
        return Reason.of_error(error, "foreign-ops", f"importing {module}")
    where = getattr(found, "__file__", None) or list(found.__path__)
    hint = f"another package {top} may come first on sys.path"
    return Reason("foreign-ops", f"{module} can't be had from {where}: {error}", hint)
