"""Wishes of the environment, carried out in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from twinkle.aten.registration import active
from twinkle.engines.activation import Activation

Carry = Callable[..., Activation]


@pytest.fixture
def carry_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Carry]:
    """Carries out wishes in this process, as an engine's process would at its start; taken back after the test."""
    made: list[Activation] = []

    def carry(**wishes: object) -> Activation:
        for name, value in wishes.items():
            monkeypatch.setenv(f"TWINKLE_A1_{name}", str(value))
        made.append(Activation())
        made[-1].carry_out()
        return made[-1]

    for name in ("OPS", "PLATFORM", "REPORT_DIR", "ON_ERROR", "REPORT_FAILED", "WISHES_FAILED"):
        monkeypatch.setenv(f"TWINKLE_A1_{name}", "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(f"TWINKLE_A1_{name}")
    yield carry
    for each in made:
        if each.installation is not None:
            each.installation.close()
    assert active() == []
