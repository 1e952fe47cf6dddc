"""The model level: ``kernelize(model)`` replaces the slow parts of a model by the best kernels of this machine.

Exactly four names are public here; importing them imports neither torch nor any backend.
"""

from __future__ import annotations

from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.core import hub, kernelize
from twinkle.kernel.registry import KernelChoice

__all__ = ["DEFAULT_KERNEL_CONFIG", "KernelChoice", "hub", "kernelize"]
