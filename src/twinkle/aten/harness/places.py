"""Where in an operator's files something is to be written: what a failed check ends with."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle.aten.harness.listed import inputs_file
from twinkle.aten.spec import OperatorSpec


def of_case(spec: OperatorSpec, name: str) -> str:
    """Where a case is listed, by its name as checks have it: ``clone/transposed/float32/0``."""
    listed, line = inputs_file(spec), f"- name: {name.split('/')[1]}"
    lines = [text.strip() for text in listed.read_text(encoding="utf-8").splitlines()]
    return _place(spec, listed, lines.index(line) + 1 if line in lines else 1)


def of_function(spec: OperatorSpec, function: Callable[..., Any]) -> str:
    """Where a function is written; the operator's folder where Python doesn't know."""
    code = getattr(function, "__code__", None)
    return str(spec.home.folder) if code is None else _place(spec, Path(code.co_filename), code.co_firstlineno)


def of_error(spec: OperatorSpec, error: BaseException) -> str:
    """Where an operator's own code was when something was raised; where all code was, if that was none of its own."""
    passed = [(Path(frame.filename), frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in passed if file.is_relative_to(spec.home.folder)]
    return _place(spec, *(own or passed)[-1])


def of_declaration(spec: OperatorSpec, field: str) -> str:
    """Where an operator declares something, or would: ``model is at clone/register.py:30``."""
    file = spec.home.folder / "register.py"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    declared = [number for number, text in enumerate(lines, start=1) if text.strip().startswith(f"{field}=")]
    if declared:
        return f"{field}= is at {_place(spec, file, declared[0])}"
    ends = [number for number, text in enumerate(lines, start=1) if text == ")"]
    return f"{field}= is missing at {_place(spec, file, ends[0] if ends else 1)}"


def _place(spec: OperatorSpec, file: Path, line: int) -> str:
    """From the operator's own folder on, since that is where its author is."""
    inside = file.is_relative_to(spec.home.folder)
    return f"{Path(spec.home.folder.name, file.relative_to(spec.home.folder)) if inside else file}:{line}"
