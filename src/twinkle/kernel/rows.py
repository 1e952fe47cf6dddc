"""What a report is made of: every entry of a mapping ends as rows, and what no entry covers is named too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinkle.kernel.config import default_chain
from twinkle.kernel.report_text import report_parts
from twinkle.layout import laid_out, plain, width_of_terminal
from twinkle.reasons import Counts, Reason

STATES = ("installed", "kept", "refused", "missing", "overridden", "unused", "failed")
"""What can become of an entry's sites.

installed: a kernel serves at least one; kept: no candidate was available or loaded; refused: candidates were there and
none accepts a site; missing: the target doesn't exist; overridden: another entry owns the sites; unused: this model has
no such site; failed: the kernel was taken out again.
"""


@dataclass
class Tried:
    """One candidate of a chain, and why it lost the sites that it lost (reason -> number of sites, 0 for all)."""

    backend: str
    reasons: dict[Reason, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "reasons": [
                {"code": reason.code, "text": reason.text, "hint": reason.hint, "sites": sites}
                for reason, sites in self.reasons.items()
            ],
        }


_NOT_THERE = {"not-registered", "no-reference"}
"""Reasons of a backend that the op doesn't have, written or derived."""


@dataclass(eq=False)
class Row:
    """What became of one entry at the sites that one backend got, or at the sites that none got.

    Attributes:
        target: the mapping's key as text.
        op: the op; None for an entry that names its implementation itself.
        state: one of :data:`STATES`.
        backend: who serves, when installed.
        implementation: qualified name of what serves, when installed.
        installer: name of the installer.
        scope: ``"model"``, or ``"process"`` when other models of this process get the kernel as well.
        instances: number of sites; None when the installer doesn't say.
        tried: the candidates in order, with their reasons.
        notes: what else there is to know.
        default: whether the entry is the default config's own.
        verified: whether ``kernelize(verify=True)`` compared what serves with the original, and it agreed.
        counts: what became of the calls.
    """

    target: str
    op: str | None
    state: str
    backend: str | None = None
    implementation: str | None = None
    installer: str = "default_installer"
    scope: str = "model"
    instances: int | None = 0
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    default: bool = False
    verified: bool = False
    counts: Counts = field(default_factory=Counts)

    @property
    def calls(self) -> int:
        """Calls that the kernel served; compiled calls are not counted."""
        return self.counts.kernel

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that the original served because this one call was outside the kernel's domain, by reason."""
        return dict(self.counts.fallbacks)

    @property
    def errors(self) -> int:
        """Calls in which the kernel raised; the exception went up to the caller."""
        return self.counts.errors

    @property
    def reasons(self) -> list[Reason]:
        """All reasons of all candidates, in order."""
        return [reason for tried in self.tried for reason in tried.reasons]

    @property
    def unimplemented(self) -> bool:
        """Whether the op has none of the chain's backends yet, and nobody who wrote the chain could name another."""
        reasons = self.reasons
        if self.state != "kept" or not reasons or {reason.code for reason in reasons} - _NOT_THERE:
            return False
        return self.default or not any(reason.hint for reason in reasons)

    def why(self) -> str:
        """The reasons in one line, for logs and errors."""
        parts = [f"{tried.backend}: {'; '.join(map(str, tried.reasons))}" for tried in self.tried if tried.reasons]
        if self.errors:
            parts.append(f"the kernel raised in {self.errors} call{'s' if self.errors > 1 else ''}")
        return " | ".join(parts + self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "target": self.target,
            "op": self.op,
            "state": self.state,
            "backend": self.backend,
            "implementation": self.implementation,
            "installer": self.installer,
            "scope": self.scope,
            "instances": self.instances,
            "tried": [tried.to_dict() for tried in self.tried],
            "notes": list(self.notes),
            "default": self.default,
            "verified": self.verified,
            "unimplemented": self.unimplemented,
            "calls": self.calls,
            "compiled": self.counts.compiled,
            "fallbacks": self.fallbacks,
            "errors": self.errors,
        }


@dataclass(frozen=True)
class Uncovered:
    """A norm, gated MLP or rotary function of the model that no entry of the mapping covers.

    Attributes:
        target: dotted path to write as the key.
        instances: how many the model has.
        op: the op that fits, found by running the module on small inputs; None when none does.
        variant: what it computes, in the op's terms.
        reason: why no op fits, when none does.
        key: what to write as the mapping's key.
    """

    target: str
    instances: int
    op: str | None = None
    variant: str | None = None
    reason: str | None = None
    key: str | None = None

    @property
    def config_line(self) -> str | None:
        """The mapping entry that would cover it, as Python source; ``model`` is the model."""
        if self.op is None:
            return None
        chain = [f'"{backend}"' for backend in default_chain(self.op)]
        backends = ", ".join(chain) if len(chain) > 1 else f"{chain[0]},"
        return f'{self.key}: KernelChoice(op="{self.op}", backends=({backends})),'

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        fields = ("target", "instances", "op", "variant", "reason", "config_line")
        return {name: getattr(self, name) for name in fields}


@dataclass
class Report:
    """Rows, and what no entry covers.

    Attributes:
        rows: what became of each entry, or would become.
        uncovered: what no entry covers; with no rows, what the default config wouldn't cover either.
        device: what was reported or planned for.
        planned: whether nothing was done yet: the states are what would be.
        device_here: whether this machine has the device, so that its packages and hardware count.
    """

    rows: list[Row]
    uncovered: list[Uncovered]
    device: str = ""
    planned: bool = False
    device_here: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "device": self.device,
            "device_here": self.device_here,
            "planned": self.planned,
            "rows": [row.to_dict() for row in self.rows],
            "uncovered": [part.to_dict() for part in self.uncovered],
        }

    def row(self, target: str) -> Row:
        """The first row whose target is, or ends with, that name.

        Raises:
            KeyError: no such row.
        """
        for row in self.rows:
            if row.target == target or row.target.endswith(f".{target}"):
                return row
        raise KeyError(f"no row for {target!r}; rows: {', '.join(row.target for row in self.rows)}")

    def table(self, all_rows: bool = False, *, width: int | None = None) -> str:
        """The report for people.

        Args:
            all_rows: also list the entries that name nothing of this model and the ops that nobody implements yet,
                instead of a line about them.
            width: columns to lay it out for; those of the terminal when None.
        """
        return plain(laid_out(report_parts(self.to_dict(), all_rows=all_rows), width or width_of_terminal()))

    def __str__(self) -> str:
        return self.table()
