"""Why something was not used, and how often what was used ran: one vocabulary for the model and the ATen level."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was not used.

    Args:
        code: a stable word for programs, e.g. ``"not-available"``.
        text: one line for people; names the thing, what was found and what was wanted.
        hint: the remedy, when there is one.
    """

    code: str
    text: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text

    @classmethod
    def of(cls, value: Reason | str, code: str) -> Reason:
        """``value`` as a Reason; a plain string gets ``code``."""
        return value if isinstance(value, Reason) else cls(code, str(value))

    @classmethod
    def of_error(cls, error: BaseException, code: str, doing: str) -> Reason:
        """An exception as a reason: ``doing`` says what raised it."""
        message = str(error).strip().splitlines()
        return cls(code, f"{doing} raised {type(error).__name__}" + (f": {message[0]}" if message else ""))


class Counting(Protocol):
    """What counts calls: in this process's memory (:class:`Counts`), or in a file. The attributes are the same."""

    kernel: int
    errors: int
    compiled: bool

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Calls that the original served, by reason."""

    def fall_back(self, reason: str) -> None:
        """Counts one call that the original served."""


@dataclass(slots=True, eq=False)
class Counts:
    """What became of the calls that reached a replacement.

    Plain integer adds on the hot path. Under the interpreter lock none is lost: it isn't given away between reading and
    writing a number, as long as nothing is called in between.

    Attributes:
        kernel: calls that the replacement served.
        fallbacks: calls that the original served, by reason.
        errors: calls in which the replacement raised.
        compiled: whether a compiler traced the replacement; its calls are not counted.
    """

    kernel: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    compiled: bool = False

    def fall_back(self, reason: str) -> None:
        """Counts one call that the original served."""
        try:
            self.fallbacks[reason] += 1
        except KeyError:
            self.fallbacks.setdefault(reason, 0)
            self.fallbacks[reason] += 1


def nearest(name: object, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known name most like ``name``, or None when none is as close as ``least``: 1 is the same, 0 is any.

    Case is ignored, since people misremember it. What somebody gave for a name may be no text at all.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=least)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or an empty string, to end an error message with."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
