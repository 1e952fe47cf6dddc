"""What a level found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec


@dataclass
class Outcome:
    """The checks of one operator at one level on one device.

    Attributes:
        checks: how many were made.
        problems: one line for each that failed.
        facts: what was counted, for the report.
        not_run: why nothing was checked; never the same as passed.
    """

    operator: str
    level: str
    device: str
    checks: int = 0
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_run: str | None = None

    @property
    def state(self) -> str:
        """``"passed"``, ``"failed"`` or ``"not run"``."""
        if self.not_run is not None:
            return "not run"
        return "passed" if self.checks and not self.problems else "failed"

    def check(self, what: str, problem: str | bool | None) -> None:
        """Notes one check: None or True is fine; False, or what is wrong, is not."""
        self.checks += 1
        if problem is not None and problem is not True:
            self.problems.append(f"{what}: {problem}" if problem else what)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ``ok`` included: None where nothing was run."""
        ok = None if self.not_run is not None else self.state == "passed"
        return {"ok": ok, "state": self.state, **vars(self)}


def started(spec: OperatorSpec, level: str, profile: Profile) -> Outcome:
    """An outcome to fill; ``not_run`` is set where the device isn't there."""
    missing = profile.missing()
    not_run = None if missing is None else f"no {profile.platform} on this machine: {missing}"
    return Outcome(spec.name, level, profile.device, not_run=not_run)
