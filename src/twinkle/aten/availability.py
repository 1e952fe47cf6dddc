"""Which of an operator's kernels run on a platform, and why the others don't."""

from __future__ import annotations

import importlib.util

from twinkle.platforms import Platform
from twinkle.reasons import Reason


def triton_missing(platform: Platform) -> Reason | None:
    """None where Triton runs programs on a platform's tensors: by a backend of its own, or interpreted."""
    if importlib.util.find_spec("triton") is None:
        return Reason("no-package", "the package triton is not installed")
    try:
        import triton

        if triton.knobs.runtime.interpret:
            return None
        target = triton.runtime.driver.active.get_current_target().backend
    except Exception as error:
        return Reason.of_error(error, "no-backend", "asking triton for its backend")
    if target != platform.triton_backend:
        return Reason("no-backend", f"Triton's backend here is {target}, which is not {platform.name}'s")
    return None


def level_missing(level: str, platform: Platform) -> Reason | None:
    """None where a kernel of that level runs on a platform: see ``OperatorSpec.kernels``."""
    if level == "triton":
        return triton_missing(platform)
    if level in ("torch", platform.name):
        return None
    return Reason("other-platform", f"it is {level}'s kernel, and this is {platform.name}")
