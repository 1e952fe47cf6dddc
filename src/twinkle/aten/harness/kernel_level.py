"""The kernel level: each kernel called directly, beside the operator's CPU reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import Case, cases
from twinkle.aten.harness.compare import difference
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import PATTERNS, poisoned
from twinkle.aten.profiles import Profile
from twinkle.aten.serving import Serving, triton_missing
from twinkle.aten.spec import OperatorSpec
from twinkle.aten.strided import shares_memory


@dataclass(frozen=True)
class Known:
    """A call of which it is known what it must give.

    Attributes:
        values: makes all arguments, on a device.
        expected: the result, on the CPU.
    """

    name: str
    values: Callable[[str], list[Any]]
    expected: Callable[[], Any]


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """Every case by every kernel that runs on the device, beside the reference."""
    outcome = started(spec, "kernel", profile)
    if outcome.not_run is None:
        compare(outcome, spec, profile, list(_beside_the_reference(spec)))
    return outcome


def _beside_the_reference(spec: OperatorSpec) -> Iterable[Known]:
    for case in cases(spec):
        yield Known(case.name, case.values, functools.partial(reference_result, spec, case))


def reference_result(spec: OperatorSpec, case: Case) -> Any:
    """What the operator's reference gives for a case."""
    return Arguments(spec.overload).call(spec.home.load(spec.reference), case.values())


def compare(outcome: Outcome, spec: OperatorSpec, profile: Profile, calls: Sequence[Known]) -> None:
    """Every call that a kernel takes, by every kernel that runs on the device, with what it allocates poisoned.

    An element that isn't written keeps the poison and can't be right for all patterns. A result of an earlier call
    can't be right either: a case's seeds differ; and no result may lie in an earlier one's memory.
    """
    for level in spec.kernels:
        missing = triton_missing(profile.found) if level == "triton" else None
        if missing is not None:
            outcome.facts[level] = f"not run: {missing}"
            continue
        serving = Serving(spec, profile.found, level)
        taken = 0
        for call in calls:
            if serving.refusal(call.values(profile.device)) is not None:
                continue
            taken += 1
            expected = call.expected()
            earlier: list[torch.Tensor] = []
            for pattern in PATTERNS:
                values = call.values(profile.device)
                with poisoned(pattern):
                    result = serving.run(values)
                outcome.check(f"{level} {call.name}", difference(spec, result, expected, values))
                again = any(shares_memory(result, other) for other in earlier)
                outcome.check(f"{level} {call.name}: lies in the memory of an earlier result", not again)
                earlier.append(result)
        outcome.check(f"{level}: the kernel takes none of the cases", taken > 0)
        outcome.facts[level] = f"{taken} cases"
