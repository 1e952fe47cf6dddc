"""A report for people: which rows are shown, in which words, and what the words mean.

Everything here reads a report's plain data (``Report.to_dict()``), which holds more than is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinkle.document import GAP, Code, Heading, Part, Points, Table, Text

PLAN_COLUMNS = ("target", "op", "state", "backend", "scope", "sites")
REPORT_COLUMNS = (*PLAN_COLUMNS, "calls", "fallbacks")
SERVED_COLUMNS = ("target", "op", "backend", "sites", "calls", "fallbacks")
NUMBERS = ("sites", "calls", "fallbacks")

PLANNED_STATES = {"installed": "would install"}
"""The states of a plan, in whose table nothing may look as if it had been done."""

LEGEND = {
    "kept": "the original stays, as no backend that the entry names can be used here",
    "refused": "the original stays, as what can be used here doesn't fit",
    "missing": "the installed packages have nothing of that name",
    "overridden": "the sites belong to another entry of the mapping",
    "unused": "the model has nothing that the entry names",
    "failed": "the kernel was taken out again, and the original is back",
    "verified": "compared with the original before it was installed: outputs and gradients agree",
    "process": "the function belongs to its Python module, so every model of this process that calls it is served",
    "sites": "the instances in this model; a function counts as one",
    "fallbacks": "calls that the kernel can't take and the original served",
}
"""What the words of the table mean; those that say it themselves are left out."""

NOTHING_DONE = (
    "Nothing is kernelized in this model: call twinkle.kernel.kernelize(model). "
    "twinkle.kernel.report.plan(model).table() shows what that would do."
)

_FEW = 8
_BACKENDS = {"any": "any backend", "custom": "your own code"}
_REASONS = {"not-registered": "not registered"}
"""Reasons that need fewer words where the backend and the op stand beside them."""


def short(target: str) -> str:
    """``transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward`` -> ``qwen3.Qwen3MLP.forward``."""
    parts = target.split(".")
    if len(parts) > 4 and parts[:2] == ["transformers", "models"]:
        return ".".join([parts[2], *parts[4:]])
    return target


@dataclass(frozen=True)
class Selection:
    """What of a report is shown.

    Attributes:
        rows: the rows of the table.
        hidden: how many entries name parts of other models.
        unimplemented: one line about the ops that wait for a backend; empty when none does.
    """

    rows: list[dict[str, Any]]
    hidden: int = 0
    unimplemented: str = ""


def select(report: dict[str, Any], all_rows: bool = False) -> Selection:
    """Leaves out what tells nothing about this model, unless ``all_rows``."""
    if all_rows:
        return Selection(report["rows"])
    shown = concerning(report["rows"])
    hidden = len(report["rows"]) - len(shown)
    return Selection([row for row in shown if not row["unimplemented"]], hidden, unimplemented_line(shown))


def concerning(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the entries that name parts of other models; a few of one's own are kept."""
    few = sum(row["state"] == "unused" and not row["default"] for row in rows) <= _FEW
    return [row for row in rows if row["state"] != "unused" or (few and not row["default"])]


def unimplemented_line(rows: Sequence[dict[str, Any]]) -> str:
    """The ops of the rows that wait for a backend, each with what is registered instead; empty when none does."""
    waiting = {}
    for row in rows:
        if row["unimplemented"]:
            hints = [reason["hint"] for tried in row["tried"] for reason in tried["reasons"] if reason["hint"]]
            others = f" ({hints[0].replace('registered:', 'registered, but not in it:')})" if hints else ""
            waiting[f"{row['op']}{others}"] = True
    return f"no backend that the chain names exists yet for {', '.join(waiting)}" if waiting else ""


def columns_of(report: dict[str, Any]) -> tuple[str, ...]:
    """A plan has no calls to show."""
    return PLAN_COLUMNS if report["planned"] else REPORT_COLUMNS


def cells(row: dict[str, Any], columns: Sequence[str], planned: bool = False) -> list[str]:
    """A row's values as text, by column."""
    installed = row["state"] == "installed"
    state = PLANNED_STATES.get(row["state"], row["state"]) if planned else row["state"]
    values = {
        "target": short(row["target"]),
        "op": row["op"] or "-",
        "state": f"{state}, verified" if row["verified"] else state,
        "backend": row["backend"] or "-",
        "scope": row["scope"],
        "sites": "?" if row["instances"] is None else str(row["instances"]),
        "calls": "compiled: not counted" if row["compiled"] and not row["calls"] else str(row["calls"]),
        "fallbacks": str(sum(row["fallbacks"].values())),
    }
    return ["-" if name in ("calls", "fallbacks") and not installed else values[name] for name in columns]


def rows_table(rows: list[dict[str, Any]], columns: Sequence[str], *, planned: bool = False) -> Table:
    """The table; rows of which nothing came are dim."""
    styles = ["" if row["state"] == "installed" else "dim" for row in rows]
    return Table(columns, [cells(row, columns, planned) for row in rows], NUMBERS, styles, word="state")


def losers(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(candidate, what for, why not), each reason once.

    What for is an op where the reason holds for all its targets that tried the candidate, else the targets.
    """
    asked: dict[tuple[str, str], set[str]] = {}
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in rows:
        target = short(row["target"])
        op = row["op"] or target
        for tried in row["tried"]:
            asked.setdefault((tried["backend"], op), set()).add(target)
            for reason in tried["reasons"]:
                key = (tried["backend"], _reason_text(reason, row))
                found.setdefault(key, {}).setdefault(op, set()).add(target)

    def what_for(backend: str, ops: dict[str, set[str]]) -> str:
        return ", ".join(
            op if asked[backend, op] == targets else ", ".join(sorted(targets)) for op, targets in ops.items()
        )

    return [(_BACKENDS.get(backend, backend), what_for(backend, ops), text) for (backend, text), ops in found.items()]


def _reason_text(reason: dict[str, Any], row: dict[str, Any]) -> str:
    text = _REASONS.get(reason["code"], reason["text"]).replace(f"op {row['op']} ", "the op ")
    # Who wrote the chain wants to know what else it could name; the default chain names on purpose what may come.
    hidden = row["default"] and reason["code"] in _REASONS
    return f"{text} ({reason['hint']})" if reason["hint"] and not hidden else text


def notes(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(target, what else there is to know about it)."""
    found = []
    for row in rows:
        said = [f"{_calls(n)} left to the original: {reason}" for reason, n in row["fallbacks"].items()]
        if row["errors"]:
            said.append(f"the kernel raised in {row['errors']} call{'s' if row['errors'] > 1 else ''}")
        found += [(short(row["target"]), note) for note in (*said, *row["notes"])]
    return found


def _calls(number: int) -> str:
    return "1 call was" if number == 1 else f"{number} calls were"


def reasons(rows: list[dict[str, Any]]) -> list[Part]:
    """Why candidates lost, and the notes: one paragraph each, below headings."""
    lost = [(f"{backend} for {ops}", text) for backend, ops, text in losers(rows)]
    parts: list[Part] = []
    for heading, points in (("Why not more", lost), ("Notes", notes(rows))):
        if points:
            parts += [GAP, Heading(heading), Points(points)]
    return parts


def legend(rows: list[dict[str, Any]]) -> list[str]:
    """What the words mean that occur in the table of these rows."""
    words = {word for row in rows for word in (row["state"], row["scope"])} | {"sites"} if rows else set()
    words |= {"verified"} if any(row["verified"] for row in rows) else set()
    words |= {"fallbacks"} if any(row["fallbacks"] for row in rows) else set()
    return [f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in words]


def elsewhere(report: dict[str, Any]) -> str:
    """What to know about a plan for a device that this machine doesn't have; empty when it has it."""
    if report["device_here"]:
        return ""
    device = report["device"]
    return (
        f"This machine has no {device}: packages and hardware were judged as they are here. "
        f"Plan on a machine with {device} to see what it would choose."
    )


def report_parts(
    report: dict[str, Any], *, all_rows: bool = False, lists_all: str = "table(all_rows=True)"
) -> list[Part]:
    """The whole report: table, what is left out of it, reasons, what nothing covers, and what the words mean.

    Args:
        report: ``Report.to_dict()``.
        all_rows: also list the entries that name nothing of this model, and the ops without a backend.
        lists_all: what the reader can do to get them listed.
    """
    selection = select(report, all_rows)
    parts: list[Part] = [Text(elsewhere(report), "yellow"), GAP] if elsewhere(report) else []
    if selection.rows:
        parts.append(rows_table(selection.rows, columns_of(report), planned=report["planned"]))
    else:
        parts.append(Text(_nothing(report, selection)))
    parts.append(Text(selection.unimplemented, "dim"))
    if selection.hidden:
        entries = "1 more entry names" if selection.hidden == 1 else f"{selection.hidden} more entries name"
        parts.append(Text(f"{entries} parts of other models ({lists_all} lists them)", "dim"))
    parts += reasons([row for row in selection.rows if row["state"] != "unused"])
    parts += _uncovered(report)
    words = [Text(line, "dim") for line in legend(selection.rows)]
    return [*parts, GAP, *words] if words else parts


def _nothing(report: dict[str, Any], selection: Selection) -> str:
    if not report["rows"]:
        return "The mapping has no entries." if report["planned"] else NOTHING_DONE
    return f"No entry of the mapping {'can be installed in' if selection.unimplemented else 'concerns'} this model."


def _uncovered(report: dict[str, Any]) -> list[Part]:
    if not report["uncovered"]:
        return []
    by = "any entry" if report["rows"] or report["planned"] else "the default mapping"
    parts: list[Part] = [GAP, Heading(f"Not covered by {by}")]
    for part in report["uncovered"]:
        parts.append(Points([(f"{part['instances']} x {part['target']}", part["variant"] or part["reason"])]))
        if part["config_line"]:
            parts.append(Code(partial(_code, part["config_line"])))
    return parts


def _code(line: str, width: int) -> list[str]:
    """A mapping's entry to copy, after its colon on a second line where it is too long for one."""
    if len(line) + 6 <= width:
        return [f"      {line}"]
    key, separator, value = line.partition(": ")
    return [f"      {key}{separator.rstrip()}", f"          {value}"]
