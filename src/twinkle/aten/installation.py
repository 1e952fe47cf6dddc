"""Several operators at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from twinkle.aten import catalog
from twinkle.aten.errors import RegistrationError
from twinkle.aten.handle import Handle
from twinkle.aten.keys import DEFAULT_KEY, platform_here, platforms_meant
from twinkle.aten.profiles import Profile
from twinkle.aten.registration import Registration, register
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import Platform
from twinkle.reasons import Reason, did_you_mean, nearest

WORDS = ("all", "auto")
"""What stands for a choice of operators."""


class Installation(Handle):
    """Registrations that are taken back together.

    Attributes:
        registrations: by operator.
        left_out: the operators that ``"all"`` or ``"auto"`` didn't install, with the reason: their package can't be
            had, or ``"auto"`` found nothing to gain.
    """

    def __init__(self, registrations: dict[str, Registration], left_out: dict[str, Reason] | None = None) -> None:
        self.registrations = registrations
        self.left_out = left_out or {}

    @property
    def closed(self) -> bool:
        """Whether something was installed, and all of it taken back."""
        return bool(self.registrations) and all(each.closed for each in self.registrations.values())

    def close(self) -> None:
        """Takes all of them back, the latest first. A second call does nothing."""
        for registration in reversed(self.registrations.values()):
            registration.close()

    def __repr__(self) -> str:
        left_out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"<Installation of {', '.join(self.registrations) or 'nothing'}{left_out}>"


def install(
    operators: Collection[str] | str = "all", *, platform: str | Profile, modes: Mapping[str, str] | None = None
) -> Installation:
    """Registers operators on a platform: all or nothing.

    Args:
        operators: names; ``"all"``: those that can be registered and do no harm in the process meanwhile; one whose
            package is broken is in ``Installation.left_out`` and takes no other along. ``"auto"``: those of them whose
            kernel is faster than PyTorch's own, by more than the noise, on one of the calls in their ``benchmark.yaml``
            at least, and slower on none that it would serve in its mode. That is measured here and now, which takes
            some seconds for each; nothing else should run meanwhile. An operator that
            PyTorch calls within others, as it calls ``copy_`` in every ``to``, is left out: those calls would all take
            longer, and the list times none of them. The others are in ``Installation.left_out`` too.
        platform: a platform's name or alias, or a device profile.
        modes: who serves the calls of an operator. ``"auto"``: its kernel, but PyTorch's own where that is faster, as
            the operator's routes say. ``"triton"``: its Triton kernel for every call that it can take. ``"native"``:
            PyTorch's own, and the calls are counted. Operators that aren't named have what the profile says, else
            ``"auto"``.

    Raises:
        RegistrationError: no operator is named, or an unknown one; an unknown mode, a mode for an operator that isn't
            installed, an operator whose list of timed calls can't be used, or one that can't be registered; those
            before it were taken back.
        NotRegistrableError: one of them isn't registered by design; likewise.
    """
    if not (modes is None or isinstance(modes, Mapping)):
        text = f"modes is a mapping of operators to modes, not {modes!r}"
        raise RegistrationError.of("install", "bad-argument", text)
    specs, left_out = _meant(operators)
    chosen = dict(modes or {})
    if isinstance(platform, Profile):
        name, key = platform.platform, platform.dispatch_key
        chosen = {**platform.modes, **chosen}
    else:
        name, key = platform, DEFAULT_KEY
    installed = [spec.name for spec in specs]
    for unused in set(modes or ()) - set(installed):
        text = f"has a mode but isn't installed; installed: {', '.join(installed)}{did_you_mean(unused, installed)}"
        raise RegistrationError.of(unused, "unknown-operator", text)
    if operators == "auto":
        found = platform_here("install", key, platforms_meant("install", key, name))
        slower = {spec.name: _why_not(spec, found, chosen.get(spec.name, "auto")) for spec in specs}
        left_out |= {name: reason for name, reason in slower.items() if reason is not None}
    done = Installation({}, left_out)
    try:
        for spec in specs:
            if spec.name not in left_out:
                mode = chosen.get(spec.name, "auto")
                done.registrations[spec.name] = register(spec, key, None, name, mode)
    except BaseException:
        done.close()
        raise
    return done


def _meant(operators: Any) -> tuple[list[OperatorSpec], dict[str, Reason]]:
    """Those that are meant, and why others that would be can't be had.

    Raises:
        RegistrationError: one that is named can't be had, or none of all.
    """
    if operators in WORDS:
        every, broken = [], dict[str, RegistrationError]()
        for name in catalog.chosen():
            try:
                every.append(catalog.operator(name))
            except RegistrationError as error:
                broken[name] = error
        if not every:
            raise next(iter(broken.values()))
        fit = [spec for spec in every if spec.by_design is spec.caution is None]
        return fit, {name: error.reason for name, error in broken.items()}
    listed = [operators] * bool(operators) if isinstance(operators, str) else operators
    if not isinstance(listed, Collection) or isinstance(listed, Mapping) or not all(isinstance(n, str) for n in listed):
        text = f"operators are a list of names, 'all' or 'auto', not {operators!r}"
        raise RegistrationError.of("install", "bad-argument", text)
    if not listed:
        raise RegistrationError.of("install", "bad-argument", "no operator is named", "names, 'all' or 'auto'")
    for name in set(listed) - set(catalog.names()):
        _check_word(name, alone=isinstance(operators, str))
    return [catalog.operator(name) for name in dict.fromkeys(listed)], {}


def _check_word(name: str, alone: bool) -> None:
    """What is no operator but means something all the same: several in one text, or a word for a choice of them."""
    several = [each for each in re.split(r"[\s,;]+", name) if each]
    if len(several) > 1:
        text = f"{name!r} is one name, and no operator's"
        raise RegistrationError.of("install", "unknown-operator", text, f"several are a list: {several!r}")
    word = nearest(name, [*catalog.names(), *WORDS])
    if word in WORDS:
        text = f"{name!r} is no operator" if alone else f"{name!r} is no operator, and a list holds only those"
        raise RegistrationError.of("install", "unknown-operator", text, f"did you mean {word!r} itself?")


def _why_not(spec: OperatorSpec, platform: Platform, mode: str) -> Reason | None:
    """None when an operator's kernel, in that mode, wins somewhere on this machine, and loses nowhere."""
    if spec.called_within is not None:
        text = f"PyTorch calls it within {spec.called_within}: all those calls would take longer on the host"
        return Reason("called-within", text, "name it where its kernel gains more than they lose")
    from twinkle.aten.harness.listed import InputsError

    try:
        from twinkle.bench.aten import loses, measure, size_for, wins

        size = size_for(torch.device(platform.device_type))
        rows = list(measure(spec, platform, size=size, rounds=10, seconds=0.5, mode=mode, peer=False))
    except InputsError as error:
        raise RegistrationError.of(spec.name, "bad-inputs", str(error)) from None
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        text = "auto reads benchmark.yaml, and the package PyYAML is not installed"
        raise RegistrationError.of(spec.name, "no-package", text, "pip install 'twinkle-kernel[aten]'") from error
    notes = dict.fromkeys(row.note for row in rows if row.note)
    if not wins(rows):
        text = "its kernel is faster than PyTorch's on none of its benchmark's calls"
    elif slower := loses(rows):
        text = f"its kernel, faster than PyTorch's elsewhere, is slower on {', '.join(slower)}"
    else:
        return None
    return Reason("slower", "; ".join([text, *notes]))
