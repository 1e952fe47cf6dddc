"""``twinkle-kernel ops report``: what the operators did in the processes of an engine."""

from __future__ import annotations

from pathlib import Path

from twinkle.commands.console import CommandError, print_json, show_parts, stdout
from twinkle.exits import FAILED, FINE, NOTHING_RUN


def run(folder: Path, *, as_json: bool) -> int:
    """Prints the report.

    Returns:
        1 when operators weren't activated, a kernel raised, or a file can't be read; 3 when there is no record; else 0.

    Raises:
        CommandError: there is no such folder.
    """
    from twinkle.engines.merged import merged, parts

    if not folder.is_dir():
        raise CommandError(f"no folder {folder}: name the one that TWINKLE_A1_REPORT_DIR named")
    facts = merged(folder)
    if as_json:
        print_json(facts)
    elif facts["processes"] or facts["problems"]:
        show_parts(stdout(), parts(facts))
    else:
        print(f"no record in {folder}: no process started with TWINKLE_A1_OPS set and TWINKLE_A1_REPORT_DIR={folder}")
    if facts["problems"] or any(found["errors"] for found in facts["operators"].values()):
        return FAILED
    return FINE if facts["processes"] else NOTHING_RUN
