"""The report on a model: what a mapping would do to it, and what has been done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle.kernel.report_text import short
from twinkle.kernel.rows import STATES, Report, Row, Tried, Uncovered
from twinkle.platforms import PLATFORMS, platform_of

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["STATES", "Report", "Row", "Tried", "Uncovered", "plan", "report", "short"]


def plan(model: nn.Module, mapping: Any = None, *, device: torch.device | str | None = None) -> Report:
    """What ``kernelize(model, mapping)`` would do. Nothing is changed and no hub kernel is fetched.

    Args:
        model: may be on the meta device.
        mapping: as for :func:`~twinkle.kernel.kernelize`.
        device: the device to plan for; the model's own when None.
    """
    from twinkle.kernel.journal import lock
    from twinkle.kernel.plan import make_plan  # not at the top: torch is imported when there is a model to look at

    with lock:
        made = make_plan(model, mapping, device=device, fetch=False)
    where = made.index.device
    return Report(
        [row.told() for row in made.rows()],
        made.uncovered(),
        str(where),
        planned=True,
        device_here=_is_here(where.type),
    )


def _is_here(device_type: str) -> bool:
    """Whether this machine has a device of that type; of those that no platform has, the meta device say, all."""
    known = {platform.device_type for platform in PLATFORMS.values()}
    return device_type not in known or platform_of(device_type) is not None


def report(model: nn.Module) -> Report:
    """What is installed on a model now, how often it was called, and what nothing covers.

    The calls are counted on in its rows; all else is as it was found. Where nothing is installed, there are no rows,
    and ``uncovered`` is what the default config wouldn't cover.
    """
    from twinkle.kernel.journal import lock
    from twinkle.kernel.live_rows import report_of
    from twinkle.kernel.targets import check_model

    check_model(model, "report")
    with lock:
        return report_of(model)
