"""Several operators at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.aten import catalog
from twinkle.aten.errors import RegistrationError
from twinkle.aten.keys import DEFAULT_KEY
from twinkle.aten.profiles import Profile
from twinkle.aten.registration import Registration, register
from twinkle.reasons import Reason, did_you_mean


class Installation:
    """Registrations that are taken back together.

    Attributes:
        registrations: by operator.
    """

    def __init__(self, registrations: dict[str, Registration]) -> None:
        self.registrations = registrations

    def close(self) -> None:
        """Takes all of them back, the latest first. A second call does nothing."""
        for registration in reversed(self.registrations.values()):
            registration.close()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Installation of {', '.join(self.registrations) or 'nothing'}>"


def install(
    operators: Sequence[str] | str = "all", *, platform: str | Profile, modes: Mapping[str, str] | None = None
) -> Installation:
    """Registers operators on a platform: all or nothing.

    Args:
        operators: names, or ``"all"``: those that can be registered and do no harm in the process meanwhile.
        platform: a platform's name or alias, or a device profile.
        modes: who serves the calls of an operator. ``"auto"``: its kernel, but PyTorch's own where that is faster, as
            the operator's routes say. ``"triton"``: its Triton kernel for every call that it can take. ``"native"``:
            PyTorch's own, and the calls are counted. Operators that aren't named have what the profile says, else
            ``"auto"``.

    Raises:
        RegistrationError: an unknown mode, a mode for an operator that isn't installed, or one of them can't be
            registered; those before it were taken back.
        NotRegistrableError: one of them isn't registered by design; likewise.
    """
    if operators == "all":
        every = [catalog.operator(name) for name in catalog.names()]
        specs = [spec for spec in every if spec.by_design is spec.caution is None]
    else:
        specs = [catalog.operator(name) for name in ([operators] if isinstance(operators, str) else operators)]
    chosen = dict(modes or {})
    if isinstance(platform, Profile):
        name, key = platform.platform, platform.dispatch_key
        chosen = {**platform.modes, **chosen}
    else:
        name, key = platform, DEFAULT_KEY
    installed = [spec.name for spec in specs]
    for unused in set(modes or ()) - set(installed):
        text = f"has a mode but isn't installed; installed: {', '.join(installed)}{did_you_mean(unused, installed)}"
        raise RegistrationError(unused, Reason("unknown-operator", text))
    done = Installation({})
    try:
        for spec in specs:
            mode = chosen.get(spec.name, "auto")
            done.registrations[spec.name] = register(spec, key, None, name, mode)
    except BaseException:
        done.close()
        raise
    return done
