"""The text of the demo: this project's own documents.

In a checkout these are its Markdown files and its licence; an installed wheel has its README and licence in its
metadata. The docstrings of the package's own sources are text too, and are there in both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

DISTRIBUTION = "twinkle-kernel"
IN_CHECKOUT = ("*.md", "LICENSE", "docs/**/*.md", "ops/**/*.md", "cookbook/**/*.md", "benchmarks/**/*.md")


@dataclass(frozen=True)
class Document:
    """A name for people, and the text."""

    name: str
    text: str


def documents() -> list[Document]:
    """The project's documents and docstrings, always in the same order; none of them empty."""
    root = checkout()
    written = list(_of_checkout(root) if root else _of_distribution())
    return [document for document in [*written, *_docstrings()] if document.text.strip()]


def checkout() -> Path | None:
    """The folder of the checkout that this package is imported from, if it is one."""
    package = resources.files("twinkle")
    if not isinstance(package, Path):  # imported from a zip
        return None
    root = package.resolve().parent.parent
    project = root / "pyproject.toml"
    is_ours = project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(encoding="utf-8")
    return root if is_ours else None


def _of_checkout(root: Path) -> Iterator[Document]:
    found = {path for pattern in IN_CHECKOUT for path in root.glob(pattern)}
    for path in sorted(found):
        yield Document(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def _of_distribution() -> Iterator[Document]:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    yield Document("README (package metadata)", str(distribution.metadata.json.get("description", "")))
    for file in distribution.files or ():
        if file.name.startswith("LICEN") and ".dist-info" in file.as_posix():
            yield Document(file.name, file.read_text(encoding="utf-8"))


def _docstrings() -> Iterator[Document]:
    for name, source in _sources(resources.files("twinkle"), "twinkle"):
        tree = ast.parse(source)
        holders = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        yield Document(name, "\n\n".join(text for node in holders if (text := ast.get_docstring(node))))


def _sources(folder: Any, name: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _sources(entry, f"{name}.{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"docstrings of {name}/{entry.name}", entry.read_text(encoding="utf-8")
