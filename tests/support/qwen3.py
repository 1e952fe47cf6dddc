"""The model that most tests kernelize, with the test backend ``loopback`` for all that is replaced in it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.models import mapping
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize

QWEN3 = {"qwen3.Qwen3RMSNorm": 9, "qwen3.Qwen3MLP.forward": 2, "qwen3.apply_rotary_pos_emb": 1}
"""What is installed in it: target -> instances."""


def qwen3(**options: Any) -> nn.Module:
    return presets.build("qwen3", **options)


def loopback(*names: str) -> dict[str, KernelChoice]:
    """For these targets, or all of a Qwen3, see :func:`tests.support.models.mapping`."""
    return mapping("loopback", *(names or ("qwen3.",)))


def kernelized_qwen3() -> nn.Module:
    return kernelize(qwen3(), loopback())
