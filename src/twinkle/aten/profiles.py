"""Device profiles: the facts about one chip that a registration and its checks need, as YAML files.

One chip is one profile; other names for it are aliases. The files lie in ``configs/devices``, whose ``template.yaml``
explains every line, and in the folders that the environment variable ``TWINKLE_PROFILES`` names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle.platforms import Platform, get_platform
from twinkle.reasons import did_you_mean

MODES = ("auto", "triton", "native")
"""Who serves an operator's calls."""

_HERE = Path(__file__).resolve().parent
FOLDERS = (_HERE / "devices", _HERE.parents[2] / "configs" / "devices")
"""In an installed package, and in a checkout; the first that exists counts."""

VARIABLE = "TWINKLE_PROFILES"
"""Folders with profiles of the user's own, divided as ``PATH`` is."""

_TEMPLATE = "template.yaml"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One chip.

    Attributes:
        name: the file's name.
        platform: the platform's name, see :mod:`twinkle.platforms`.
        dispatch_key: what ``register_a1`` gets.
        device: the PyTorch device that checks run on, ``"npu:0"``.
        aliases: other names for the chip.
        modes: by operator, who serves its calls: see :func:`twinkle.aten.install`.
    """

    name: str
    platform: str
    dispatch_key: str
    device: str
    aliases: tuple[str, ...] = ()
    modes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        platform = get_platform(self.platform)
        accepted = (platform.autograd_key, platform.dispatch_key)
        if self.dispatch_key not in accepted:
            raise ValueError(f"dispatch_key {self.dispatch_key!r} is not {platform.name}'s: {' or '.join(accepted)}")
        for operator, mode in self.modes.items():
            if mode not in MODES:
                raise ValueError(f"mode {mode!r} of {operator} is none of {', '.join(MODES)}")
        kind, colon, number = self.device.partition(":")
        if colon and not number.isdecimal():
            raise ValueError(f"device {self.device!r} has {number!r} where its number should be")
        if kind != platform.device_type:
            raise ValueError(f"device {self.device!r} is not of {platform.name}'s type {platform.device_type}")

    @property
    def found(self) -> Platform:
        """The platform itself."""
        return get_platform(self.platform)


def profiles() -> dict[str, Profile]:
    """All profiles by name.

    Raises:
        ValueError: a file holds something else than a profile, two answer to one name, or a folder isn't there; the
            message names the file or folder.
    """
    found: dict[str, Profile] = {}
    owners: dict[str, Path] = {}
    for folder in _folders():
        for file in sorted(folder.glob("*.yaml")):
            if file.name == _TEMPLATE:
                continue
            made = _read(file)
            for name in (made.name, *made.aliases):
                other = owners.setdefault(name, file)
                if other != file:
                    raise ValueError(f"{file}: the name {name!r} is taken by {other}; one chip is one profile")
            found[made.name] = made
    return found


def profile(name: str) -> Profile:
    """The profile of that name or alias, or that of a file.

    Args:
        name: one that ends with ``.yaml`` is a file's.

    Raises:
        ValueError: unknown, the message lists the known ones and the nearest; or see :func:`profiles`.
    """
    if name.endswith(".yaml"):
        if not Path(name).is_file():
            raise ValueError(f"no such device profile: {name}")
        return _read(Path(name))
    known = profiles()
    for candidate in known.values():
        if name in (candidate.name, *candidate.aliases):
            return candidate
    names = [name for p in known.values() for name in (p.name, *p.aliases)]
    raise ValueError(f"unknown device profile {name!r}; known: {', '.join(names)}{did_you_mean(name, names)}")


def _folders() -> list[Path]:
    own = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in own:
        if not folder.is_dir():
            raise ValueError(f"{VARIABLE} names {folder}, which is no folder")
    return [next(folder for folder in FOLDERS if folder.is_dir()), *own]


def _read(file: Path) -> Profile:
    import yaml

    fields = {field.name for field in dataclasses.fields(Profile)}
    try:
        found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: a device profile is a mapping of {', '.join(sorted(fields))}")
    strange = sorted(set(found) - fields, key=str)
    if strange:
        raise ValueError(f"{file}: unknown field {strange[0]!r}{did_you_mean(str(strange[0]), fields)}")
    try:
        _check_words(found)
        optional = {"aliases": _aliases(found.get("aliases")), "modes": _modes(found.get("modes"))}
        made = Profile(**{**found, **optional})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    if made.name != file.stem:
        raise ValueError(f"{file}: the name {made.name!r} is not the file's")
    return made


def _aliases(found: Any) -> tuple[str, ...]:
    if not (found is None or (isinstance(found, list) and all(isinstance(alias, str) for alias in found))):
        raise ValueError(f"aliases is a list of names, not {found!r}")
    return tuple(found or ())


def _modes(found: Any) -> dict[str, str]:
    if not (found is None or isinstance(found, dict)):
        raise ValueError(f"modes is a mapping of operators to modes, not {found!r}")
    return found or {}


def _check_words(found: dict[str, Any]) -> None:
    for each in dataclasses.fields(Profile):
        value = found.get(each.name, "")
        if each.type == "str" and not isinstance(value, str):
            raise ValueError(f"{each.name} is a word, not {value!r}")
