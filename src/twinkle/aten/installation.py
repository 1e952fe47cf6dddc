"""Several operators at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle.aten import catalog
from twinkle.aten.keys import DEFAULT_KEY
from twinkle.aten.registration import Registration


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


def install(operators: Sequence[str] | str = "all", *, platform: str) -> Installation:
    """Registers operators on a platform: all or nothing.

    Args:
        operators: names, or ``"all"``: those that can be registered and do no harm in the process meanwhile.
        platform: a platform's name or alias.

    Raises:
        RegistrationError: one of them can't be registered; those before it were taken back.
        NotRegistrableError: one of them isn't registered by design; likewise.
    """
    if operators == "all":
        every = [catalog.operator(name) for name in catalog.names()]
        specs = [spec for spec in every if spec.by_design is spec.caution is None]
    else:
        specs = [catalog.operator(name) for name in ([operators] if isinstance(operators, str) else operators)]
    done = Installation({})
    try:
        for spec in specs:
            done.registrations[spec.name] = spec.register_a1(DEFAULT_KEY, None, platform)
    except BaseException:
        done.close()
        raise
    return done
