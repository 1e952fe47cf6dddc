"""An operator's line in the ``pyproject.toml`` of the project that brings it."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path

from twinkle.aten.catalog import GROUP
from twinkle.aten.errors import RegistrationError

HEADER = f'[project.entry-points."{GROUP}"]'

_HEADER = re.compile(rf"""\s*\[\s*project\s*\.\s*["']?entry-points["']?\s*\.\s*["']{re.escape(GROUP)}["']\s*\]""")
_ENTRY = re.compile(r"""\s*["']?(\w+)["']?\s*=""")


def add_entry_point(name: str, value: str, project: Path) -> bool:
    """Names an operator in a ``pyproject.toml``; nothing else in the file is another than before.

    Args:
        name: the operator's.
        value: ``"chip_ops.mish.register:SPEC"``.

    Returns:
        False where it was there already.

    Raises:
        RegistrationError: it can't be added; the message says what to write instead, and the file is as it was.
    """
    line = f'{name} = "{value}"'
    try:
        text = project.read_bytes().decode()
        before = tomllib.loads(text)
    except (OSError, ValueError) as problem:
        raise _refused(name, line, f"it can't be read: {problem}") from None
    wanted = copy.deepcopy(before)
    try:
        listed = wanted["project"].setdefault("entry-points", {}).setdefault(GROUP, {})
        there = listed.setdefault(name, value)
    except (KeyError, AttributeError):
        raise _refused(name, line, "it describes no project in the form of [project]") from None
    if there != value:
        raise _refused(name, line, f"it says that {name} is {there!r}")
    if wanted == before:
        return False
    changed = _with_line(text, name, line)
    try:
        as_wanted = tomllib.loads(changed) == wanted
    except ValueError:
        as_wanted = False
    if not as_wanted:  # as where entry points are written in a table on one line
        raise _refused(name, line, "its entry points are written in a form that isn't edited")
    project.write_bytes(changed.encode())
    return True


def _with_line(text: str, name: str, line: str) -> str:
    """The line after the last entry that comes before it by name, so that a sorted section stays sorted."""
    lines = text.splitlines(keepends=True)
    end = "\r\n" if "\r\n" in text else "\n"
    header = next((number for number, each in enumerate(lines) if _HEADER.match(each)), None)
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += end
    if header is None:
        return "".join([*lines, end, HEADER + end, line + end])
    place = header + 1
    for number in range(header + 1, len(lines)):
        if lines[number].lstrip().startswith("["):
            break
        entry = _ENTRY.match(lines[number])
        if entry and entry[1] < name:
            place = number + 1
    return "".join([*lines[:place], line + end, *lines[place:]])


def _refused(name: str, line: str, why: str) -> RegistrationError:
    return RegistrationError.of(name, "bad-argument", why, f"write it yourself, in the section {HEADER}: {line}")
