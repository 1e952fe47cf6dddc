"""Two backends for tests, made for every op: ``loopback`` is the reference itself, ``refuse`` always has a reason.

With them the whole way from a mapping to an installed kernel is exercised on a CPU, for every family.
"""

from __future__ import annotations

from typing import Any

from twinkle.kernel.ops.derived import reference_impl
from twinkle.kernel.registry import (
    KernelChoice,
    KernelImpl,
    OpDefinition,
    register_backend_for_every_op,
    unregister_backend_for_every_op,
)
from twinkle.reasons import Reason


def _refuse(op: OpDefinition) -> KernelImpl:
    def never_loaded(target: Any) -> Any:
        raise AssertionError("a refused kernel was loaded")

    return KernelImpl(never_loaded, lambda: (True, None), lambda site: Reason("refused", "refuse refuses everything"))


def register_test_backends() -> None:
    """Makes ``loopback`` and ``refuse`` known for every op, those registered later included."""
    register_backend_for_every_op("loopback", reference_impl)
    register_backend_for_every_op("refuse", _refuse)


def unregister_test_backends() -> None:
    """Takes both back."""
    for backend in ("loopback", "refuse"):
        unregister_backend_for_every_op(backend)


def with_backends(mapping: dict[Any, Any], *backends: str) -> dict[Any, Any]:
    """The mapping with every KernelChoice's chain replaced; a test's way to run all families through one backend."""
    return {
        key: KernelChoice(value.op, backends, value.installer) if isinstance(value, KernelChoice) else value
        for key, value in mapping.items()
    }
