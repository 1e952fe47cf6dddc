"""What dtypes, packages and their versions are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def top_package(module: object) -> str:
    """``transformers.models.qwen3`` -> ``transformers``; of anything that a class may have as its ``__module__``."""
    return str(module).partition(".")[0]


def version_of(distribution: str) -> str | None:
    """The version of what is installed, None where it isn't.

    It is read from the metadata: nothing is imported, so a broken package is no obstacle.
    """
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
