"""Files that belong to the sources but are no code: beside it in an installed package, elsewhere in a checkout."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

FOLDERS = {"devices": "configs/devices", "template": "templates/operator"}
"""In an installed package, and in a checkout. ``pyproject.toml`` says the same to what builds the package."""


def shipped(name: str) -> Path:
    """One of :data:`FOLDERS`, by its name in an installed package."""
    installed = _HERE / name
    return installed if installed.is_dir() else _HERE.parents[2] / FOLDERS[name]
