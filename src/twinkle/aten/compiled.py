"""What ``torch.compile`` has made in this process: code made by inductor calls no operator, nor a kernel under it.

The compiler isn't imported to find out.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("twinkle.aten")

_told_of = 0
"""How many graphs there were at the last WARNING: several operators that are registered one after another need one."""


def compiled_graphs() -> int:
    """How many graphs were made in this process, or loaded as an earlier one's code.

    Another thread may just be importing the compiler, or go through its numbers.
    """
    return _traced() + len(_loaded())


def in_use() -> bool:
    """Whether something that was compiled may still run as it is: nothing does after ``torch._dynamo.reset()``.

    Code that an earlier process made and this one only loaded is known where nothing was traced since.
    """
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    return bool(getattr(codes, "seen", ())) or (not _traced() and bool(_loaded()))


def warn_of_earlier(operator: str) -> bool:
    """Whether something was compiled before an operator's registration, which a WARNING tells of once."""
    global _told_of
    if not in_use():
        return False
    graphs = compiled_graphs()
    if graphs != _told_of:
        _told_of = graphs
        text = (
            "%s: something was compiled before its kernel was registered, and code made by inductor goes around it, "
            "uncounted: register first, or call torch._dynamo.reset() now, after which it is compiled anew"
        )
        logger.warning(text, operator)
    return True


def _traced() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return counters.get("stats", {}).get("unique_graphs", 0)


def _loaded() -> list[object]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    return getattr(cache, "modules", [])
