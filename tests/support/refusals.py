"""Wrong input is an error, and a readable one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from twinkle.kernel import kernelize
from twinkle.kernel.report import plan


def refused(model: Any, mapping: Any, *words: str, **options: Any) -> str:
    """kernelize and plan both raise a ValueError with all of these words."""
    with pytest.raises(ValueError) as raised:
        kernelize(model, mapping, **options)
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert "\n" not in message and len(message) < 700, message
    if not options:
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(model, mapping)
    return message
