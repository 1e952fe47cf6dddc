"""YAML files that people write: read, and checked before anything is made of them, with errors for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.reasons import did_you_mean


@dataclass(frozen=True)
class Field:
    """One key of a mapping.

    Args:
        kind: what its value is, for the message: ``"a word"``.
        fits: whether a value is that.
        required: whether it must be there.
    """

    kind: str
    fits: Callable[[Any], bool]
    required: bool = True

    def or_none(self) -> Field:
        """The same, which may be left out or empty."""
        return Field(self.kind, lambda value: value is None or self.fits(value), required=False)


def is_whole(value: Any) -> bool:
    """A whole number; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of what fits."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def is_word(value: Any) -> bool:
    """Text that isn't empty."""
    return isinstance(value, str) and bool(value)


WORD = Field("a word", is_word)
WORDS = Field("a list of names", is_list_of(is_word))
MAPPING = Field("a mapping", lambda value: isinstance(value, dict))
TRUTH = Field("true or false", lambda value: isinstance(value, bool))


def read_yaml(file: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: it can't be read, is no YAML, or says one thing twice, of which PyYAML would take the last; the
            message names the file.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{name!r} is there twice, also in line {node.start_mark.line + 1} and below")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of a date, say, that doesn't exist
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None


def check(found: Any, fields: Mapping[str, Field], what: str) -> None:
    """Raises for a mapping that isn't as it should be.

    Args:
        what: what it describes: ``"a device profile"``.

    Raises:
        ValueError: it is no mapping, has an unknown key or lacks one, or a value isn't of its kind.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a mapping of {', '.join(fields)}, not {found!r}")
    for unknown in found:
        if unknown not in fields:
            raise ValueError(f"unknown field {unknown!r}; known: {', '.join(fields)}{did_you_mean(unknown, fields)}")
    for name, field in fields.items():
        if name not in found:
            if field.required:
                raise ValueError(f"the field {name!r} is missing: {field.kind}")
        elif not field.fits(found[name]):
            raise ValueError(f"{name} is {field.kind}, not {found[name]!r}")
