"""The plug-in for vLLM, named by our entry point of the group ``vllm.general_plugins``.

vLLM calls it at the start of each of its processes. Whoever has this project installed beside vLLM has it called, so
without ``TWINKLE_A1_OPS`` it does nothing and imports nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """Activates the operators that the environment asks for, see :func:`twinkle.engines.activation.activate`."""
    if os.environ.get("TWINKLE_A1_OPS", "").strip():
        from twinkle.engines.activation import activate

        activate()
