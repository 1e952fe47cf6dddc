"""Where in an operator's files something is to be written: what a failed check ends with."""

from __future__ import annotations

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


def _place(spec: OperatorSpec, file: Path, line: int) -> str:
    """From the operator's own folder on, since that is where its author is."""
    inside = file.is_relative_to(spec.home.folder)
    return f"{Path(spec.home.folder.name, file.relative_to(spec.home.folder)) if inside else file}:{line}"
