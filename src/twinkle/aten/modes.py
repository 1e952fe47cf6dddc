"""Who serves an operator's calls: by routes, by its Triton kernel wherever that can, or PyTorch's own alone."""

from __future__ import annotations

from typing import Any

from twinkle.aten.availability import triton_missing
from twinkle.aten.errors import RegistrationError
from twinkle.aten.routes import routes_of
from twinkle.aten.serving import Serving, best_level
from twinkle.aten.spec import OperatorSpec
from twinkle.platforms import Platform
from twinkle.reasons import did_you_mean

MODES = ("auto", "triton", "native")
"""Who serves an operator's calls."""


class _Native(Serving):
    """No call is taken; all are counted."""

    def refusal(self, values: list[Any]) -> str | None:
        return "native-mode"

    def lasting_refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "native-mode"


def check_mode(operator: str, mode: str) -> None:
    """Raises a RegistrationError for a mode that doesn't exist."""
    if mode not in MODES:
        text = f"unknown mode {mode!r}; known: {', '.join(MODES)}{did_you_mean(str(mode), MODES)}"
        raise RegistrationError.of(operator, "unknown-mode", text)


def serving_in_mode(spec: OperatorSpec, platform: Platform, mode: str) -> Serving:
    """What serves an operator on a platform.

    Raises:
        RegistrationError: unknown mode; or the Triton kernel is wanted where there is none, or Triton doesn't run.
    """
    check_mode(spec.name, mode)
    if mode == "native":
        return _Native(spec, platform)
    if mode == "auto":
        level = best_level(spec, platform)
        return Serving(spec, platform, level, routes=routes_of(spec.name, spec.work, platform, level))
    if "triton" not in spec.kernels:
        raise RegistrationError.of(spec.name, "no-triton", "it has no Triton kernel", "mode 'auto'")
    missing = triton_missing(platform)
    if missing is not None:
        raise RegistrationError.of(spec.name, "no-triton", f"Triton doesn't run on {platform.name}: {missing}")
    return Serving(spec, platform, "triton", routed=False)
