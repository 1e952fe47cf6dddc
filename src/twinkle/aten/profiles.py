"""Device profiles: the facts about one chip that a registration and its checks need, as YAML files.

One chip is one profile; other names for it are aliases. The files lie in ``configs/devices``, whose ``template.yaml``
explains every line, and in the folders that the environment variable ``TWINKLE_PROFILES`` names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from twinkle.aten import catalog
from twinkle.aten.fields import MAPPING, WORD, WORDS, Field, check, read_yaml
from twinkle.aten.modes import MODES
from twinkle.aten.shipped import shipped
from twinkle.platforms import Platform, get_platform
from twinkle.reasons import Reason, did_you_mean

VARIABLE = "TWINKLE_PROFILES"
"""Folders with profiles of the user's own, divided as ``PATH`` is."""

_TEMPLATE = "template.yaml"

_FIELDS = {
    "name": WORD,
    "platform": WORD,
    "dispatch_key": WORD,
    "device": WORD,
    "aliases": WORDS.or_none(),
    "modes": Field("a mapping of operators to modes", MAPPING.fits).or_none(),
}
"""Of a file, as :class:`Profile` has them."""


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
        known = catalog.names()
        for operator, mode in self.modes.items():
            if operator not in known:  # its calls would be served as if nothing had been said
                text = f"modes names {operator!r}, which is no operator; known: {', '.join(known)}"
                raise ValueError(f"{text}{did_you_mean(operator, known)}")
            if mode not in MODES:
                raise ValueError(
                    f"mode {mode!r} of {operator} is none of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
                )
        kind, colon, number = self.device.partition(":")
        if colon and not number.isdecimal():
            raise ValueError(f"device {self.device!r} has {number!r} where its number should be")
        if kind != platform.device_type:
            raise ValueError(f"device {self.device!r} is not of {platform.name}'s type {platform.device_type}")
        if kind == "cpu" and int(number or 0):
            raise ValueError(f"device {self.device!r} is never there: all cores together are the device 'cpu'")

    @property
    def found(self) -> Platform:
        """The platform itself."""
        return get_platform(self.platform)

    def missing(self) -> Reason | None:
        """None when this machine has the device, else the reason: no such platform, or fewer of its devices."""
        missing = self.found.missing()
        if missing is not None:
            return missing
        kind, _, number = self.device.partition(":")
        there = torch.get_device_module(kind).device_count()
        if int(number or 0) < there:
            return None
        return Reason("no-device", f"device {self.device} is not among the {there} of the type {kind}")


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
        ValueError: no name, or unknown, the message lists the known ones and the nearest; or see :func:`profiles`.
    """
    if not isinstance(name, str):
        raise ValueError(f"a device profile is named, or is a file's path, as text: not {name!r}")
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
    return [shipped("devices"), *own]


def _read(file: Path) -> Profile:
    found = read_yaml(file)
    try:
        check(found, _FIELDS, "a device profile")
        optional = {"aliases": tuple(found.get("aliases") or ()), "modes": found.get("modes") or {}}
        made = Profile(**{**found, **optional})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if made.name != file.stem:
        raise ValueError(f"{file}: the name {made.name!r} is not the file's")
    return made
