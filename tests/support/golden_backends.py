"""Which backend wins where: target -> [op, backend] per platform, for every preset and the default mapping.

    python -m tests.support.golden_backends --write   # after a change on purpose; then read the diff

Real are the mapping, the chains, what the probes find out about each instance (on the meta device, in bfloat16), and
what each backend's ``accepts`` says of it. Simulated, since no machine has all of this, are

- the platform: its probe answers, and the model is planned for its device type;
- availability: a backend is there on the platforms that :data:`PLATFORMS` names;
- loading: what would be loaded is the op's reference, since kernels can't be loaded without their device.

A process of its own, because PyTorch's device type ``npu`` exists only after a renaming that can't be taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from twinkle import platforms, presets
from twinkle.kernel import registry
from twinkle.kernel.ops import liger_support, triton_support
from twinkle.kernel.ops.derived import reference_impl
from twinkle.kernel.report import plan
from twinkle.reasons import Reason

FILE = Path(__file__).parents[1] / "kernel" / "golden" / "backends.json"

PLATFORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "npu": ("ascend", ("npu", "torch")),
    "cuda": ("nvidia", ("triton", "torch")),
    "cuda with liger": ("nvidia", ("triton", "liger", "torch")),
    "cuda with liger alone": ("nvidia", ("liger", "torch")),
    "cpu": ("cpu", ("torch",)),
}
"""Label -> the platform's name, and the backends that are there."""


@contextlib.contextmanager
def simulated(platform: str, there: tuple[str, ...]) -> Iterator[str]:
    """Within it the machine has that platform (and a CPU) and those backends; gives the device type."""

    def probe(name: str) -> Any:
        return lambda: None if name in (platform, "cpu") else Reason("no-device", f"no {name} is simulated")

    def available(backend: str) -> Any:
        return lambda: (backend in there, f"{backend} is not simulated")

    device = platforms.PLATFORMS[platform].device_type
    probes = {name: dataclasses.replace(p, probe=probe(name)) for name, p in platforms.PLATFORMS.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(platforms.PLATFORMS, probes))
        for support in (liger_support, triton_support):
            kind = type(support._launchable)
            stack.enter_context(mock.patch.object(support, "_launchable", kind([device])))
        for op in registry.ops().values():
            load = reference_impl(op).load if op.reference else lambda target, site: object()
            impls = {
                name: dataclasses.replace(impl, load=load, available=available(name))
                for name, impl in op.implementations.items()
            }
            stack.enter_context(mock.patch.dict(op.implementations, impls))
        yield device


def table() -> dict[str, dict[str, list[str]]]:
    """Platform -> target -> [op, winner]; the winner of a target that no kernel takes is its row's state."""
    torch.utils.rename_privateuse1_backend("npu")
    models = [presets.build(name, dtype=torch.bfloat16, device="meta") for name in presets.PRESETS]
    winners: dict[str, dict[str, list[str]]] = {}
    for label, (platform, there) in PLATFORMS.items():
        found: dict[str, tuple[str, set[str]]] = {}
        with simulated(platform, there) as device:
            for model in models:
                for row in plan(model, device=device).rows:
                    if row.state != "unused":
                        found.setdefault(row.target, (str(row.op), set()))[1].add(row.backend or row.state)
        winners[label] = {target: [op, " and ".join(sorted(won))] for target, (op, won) in sorted(found.items())}
    return winners


def text_of(winners: dict[str, dict[str, list[str]]]) -> str:
    """One line per target, so that a change is one line of a diff."""
    parts = []
    for label, targets in winners.items():
        lines = ",\n".join(f"    {json.dumps(target)}: {json.dumps(row)}" for target, row in targets.items())
        parts.append(f"  {json.dumps(label)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    computed = text_of(table())
    if "--write" in sys.argv[1:]:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(computed)
    else:
        print(computed, end="")
