"""What goes wrong at a registration, and nowhere later."""

from __future__ import annotations

from typing import Any

from twinkle.reasons import Reason


class NotRegistrableError(NotImplementedError):
    """The operator is never registered, by design; nothing was changed.

    Attributes:
        code: ``by-design``.
    """

    code = "by-design"

    def __init__(self, operator: str, why: str) -> None:
        super().__init__(f"{operator} is not registered, by design: {why}")
        self._made_of = operator, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of  # a worker's exception reaches its parent


class RegistrationError(RuntimeError):
    """An operator was not registered; nothing was changed.

    Attributes:
        reason: why.
        code: a stable word for programs: ``unknown-platform``, ``unknown-key``, ``refused-key``, ``foreign-key``,
            ``ambiguous-key``, ``no-device``, ``already-registered``, ``schema``, ``unknown-operator``, ``foreign-ops``,
            ``unknown-mode``, ``no-triton``, ``bad-argument``, ``bad-inputs``, ``bad-spec``, ``no-package``, ``kind``,
            ``exists``, ``closed``.
    """

    def __init__(self, operator: str, reason: Reason) -> None:
        super().__init__(f"{operator}: {reason}")
        self.reason, self.code = reason, reason.code
        self._made_of = operator, reason

    @classmethod
    def of(cls, operator: str, code: str, text: str, hint: str | None = None) -> RegistrationError:
        """An error for the reason with that code, text and hint."""
        return cls(operator, Reason(code, text, hint))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of
