"""A report of :mod:`twinkle.kernel.report`, as plain data (``Report.to_dict()``), as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle.commands.console import plain_table
from twinkle.kernel.report import short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def shown_rows(report: dict[str, Any], all_rows: bool = False) -> list[dict[str, Any]]:
    """The rows to show; those that name nothing of this model only with ``all_rows``."""
    return [row for row in report["rows"] if all_rows or row["state"] != "unused"]


PLAN_COLUMNS = ("target", "op", "state", "backend", "scope", "sites")
SERVED_COLUMNS = ("target", "op", "backend", "sites", "calls", "fallbacks")
NUMBERS = ("sites", "calls", "fallbacks")


def cells(row: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    """A row's values as text, by column."""
    values = {
        "target": short(row["target"]),
        "op": row["op"] or "-",
        "state": row["state"],
        "backend": row["backend"] or "-",
        "scope": row["scope"],
        "sites": "?" if row["instances"] is None else str(row["instances"]),
        "calls": "compiled" if row["compiled"] and not row["calls"] else str(row["calls"]),
        "fallbacks": str(sum(row["fallbacks"].values())),
    }
    return [values[column] for column in columns]


def rows_table(rows: list[dict[str, Any]], columns: tuple[str, ...] = PLAN_COLUMNS) -> Table:
    """One line per row."""
    table = plain_table(*columns, right=NUMBERS)
    for row in rows:
        table.add_row(*cells(row, columns), style=None if row["state"] == "installed" else "dim")
    return table


def reasons(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """(backend, reason) -> what it holds for, so that each reason is said once."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        concerns = row["op"] or short(row["target"])
        entries = [
            (tried["backend"], reason["text"].replace(f" for op {row['op']}", " for this op"))
            for tried in row["tried"]
            for reason in tried["reasons"]
        ]
        entries += [(short(row["target"]), note) for note in row["notes"]]
        for entry in entries:
            ops = found.setdefault(entry, [])
            if concerns not in ops:
                ops.append(concerns)
    return found


def reasons_table(rows: list[dict[str, Any]]) -> Table | None:
    """Why candidates lost; None when there is nothing to say."""
    found = reasons(rows)
    if not found:
        return None
    table = plain_table("not chosen", "because", "for")
    for (backend, text), ops in found.items():
        table.add_row(backend, text, ", ".join(ops))
    return table


def print_report(console: Console, report: dict[str, Any], *, all_rows: bool = False) -> None:
    """The whole plan: rows, reasons, how many entries concern other models, and what nothing covers."""
    rows = shown_rows(report, all_rows)
    console.print(rows_table(rows) if rows else "no entry of the mapping concerns this model")
    table = reasons_table([row for row in rows if row["state"] != "unused"])
    if table is not None:
        console.print()
        console.print(table)
    hidden = len(report["rows"]) - len(rows)
    if hidden:
        console.print(f"\n{hidden} more entries name parts of other models (--all lists them)", style="dim")
    if report["uncovered"]:
        console.print("\nNot covered by any entry", style="bold")
        for part in report["uncovered"]:
            console.print(f"  {part['instances']} x {part['target']}: {part['variant'] or part['reason']}")
            if part["config_line"]:
                console.print(f"      {part['config_line']}", style="cyan", soft_wrap=True)
