"""Switches in the environment: one way of reading them, each time they are used and never at import."""

from __future__ import annotations

import os

OFF = ("", "0", "false", "off", "no")
"""Values that mean off, in any case; every other value means on."""


def switch(name: str, default: bool) -> bool:
    """Whether a switch is on.

    Args:
        name: the variable.
        default: what holds where it isn't set.
    """
    value = os.environ.get(name)
    return default if value is None else value.strip().lower() not in OFF
