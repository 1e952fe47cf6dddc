"""The plug-in for vLLM, named by our entry point of the group ``vllm.general_plugins``.

vLLM calls it at the start of each of its processes. Whoever has this project installed beside vLLM has it called, so
where no variable of the environment begins with ``TWINKLE_A1_`` it does nothing and imports nothing.
"""

from __future__ import annotations

import os

PREFIX = "TWINKLE_A1_"
"""What the names of all variables of the environment that mean us begin with."""


def register() -> None:
    """Activates the operators that the environment asks for, see :func:`twinkle.engines.activation.activate`."""
    if any(name.startswith(PREFIX) for name in os.environ):
        from twinkle.engines.activation import activate

        activate()
