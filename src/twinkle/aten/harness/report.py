"""An operator's ``REPORT.md``, made of the results in its ``reports/`` and of nothing else."""

from __future__ import annotations

import json
import platform as host
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec
from twinkle.naming import version_of

PACKAGES = ("torch", "triton", "transformers")


def write(spec: OperatorSpec, profile: Profile, outcomes: Sequence[dict[str, Any]]) -> Path:
    """Keeps what levels found on a device, in place of what they found before, and renders the report anew.

    Args:
        outcomes: ``Outcome.to_dict()`` of each level that was run.

    Returns:
        The report.
    """
    folder = spec.home.folder / "reports"
    folder.mkdir(exist_ok=True)
    file = folder / f"{profile.name}.json"
    levels = json.loads(file.read_text(encoding="utf-8"))["levels"] if file.exists() else {}
    levels |= {found["level"]: {**found, "versions": _versions()} for found in outcomes}
    file.write_text(json.dumps({"profile": profile.name, "levels": levels}, indent=2) + "\n", encoding="utf-8")
    report = spec.home.folder / "REPORT.md"
    report.write_text(render(spec), encoding="utf-8")
    return report


def render(spec: OperatorSpec) -> str:
    """The report as Markdown."""
    lines = [
        f"# {spec.name}: what was found",
        "",
        "Made by `twinkle-kernel ops run --report` from `reports/*.json`.",
        "",
        "| device | level | state | checks | details | versions |",
        "|---|---|---|---|---|---|",
    ]
    for file in sorted((spec.home.folder / "reports").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        for level, outcome in found["levels"].items():
            cells = found["profile"], level, outcome["state"], outcome["checks"], _details(outcome)
            lines.append(f"| {' | '.join(map(str, cells))} | {_listed(outcome['versions'])} |")
    return "\n".join(lines) + "\n"


def _details(outcome: dict[str, Any]) -> str:
    if outcome["not_run"]:
        return outcome["not_run"]
    problems = [f"{len(outcome['problems'])} problems"] if outcome["problems"] else []
    return "; ".join([*problems, *(f"{name}: {_text(value)}" for name, value in outcome["facts"].items())])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return _listed(value) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in values.items())


def _versions() -> dict[str, str]:
    found = {package: version_of(package) for package in PACKAGES}
    return {"python": host.python_version(), **{name: version for name, version in found.items() if version}}
