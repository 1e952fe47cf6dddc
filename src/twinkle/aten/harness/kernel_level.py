"""The kernel level: each kernel called directly, beside the operator's CPU reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.availability import level_missing
from twinkle.aten.harness import places
from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.compare import difference, exact, memory_of, shares_memory
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import PATTERNS, poisoned
from twinkle.aten.profiles import Profile
from twinkle.aten.serving import Serving
from twinkle.aten.spec import OperatorSpec, Semantics


@dataclass(frozen=True)
class Known:
    """A call of which it is known what it must give.

    Attributes:
        values: makes all arguments, on a device.
        expected: the result, on the CPU.
        truth: the same in fp64, of an operator that rounds in an order of its own; else None.
    """

    name: str
    values: Callable[[str], list[Any]]
    expected: Callable[[], Any]
    truth: Callable[[], Any] = lambda: None


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """Every case by every kernel that runs on the device, beside the reference."""
    outcome = started(spec, "kernel", profile)
    if outcome.not_run is None:
        for each in spec.parts:
            compare(outcome, each, profile, [by_reference(each, case.name, case.values) for case in cases(each)])
    return outcome


def by_reference(spec: OperatorSpec, name: str, values: Callable[[str], list[Any]]) -> Known:
    """A call with what the operator's reference makes of it; one that rounds is judged beside PyTorch's own kernel."""
    call, reference = Arguments(spec.overload).call, spec.home.load(spec.reference)
    if Semantics.ROUNDS not in spec.semantics:
        return Known(name, values, lambda: call(reference, values("cpu")))
    return Known(name, values, lambda: call(spec.native, values("cpu")), lambda: call(reference, exact(values("cpu"))))


def compare(outcome: Outcome, spec: OperatorSpec, profile: Profile, calls: Sequence[Known]) -> None:
    """Every call that a kernel takes, by every kernel that runs on the device, with what it allocates poisoned.

    An element that isn't written keeps the poison and can't be right for all patterns. A result of an earlier call
    can't be right either: a case's seeds differ; and no result may lie in an earlier one's memory.
    """
    of = "" if spec.name == outcome.operator else f" of {spec.name}"
    for level in spec.kernels:
        missing = level_missing(level, profile.found)
        if missing is not None:
            outcome.facts[f"{level}{of}"] = f"not run: {missing}"
            continue
        serving = Serving(spec, profile.found, level, routed=False)
        taken = 0
        for call in calls:
            if serving.refusal(call.values(profile.device)) is not None:
                continue
            taken += 1
            try:
                expected, truth = call.expected(), call.truth()
            except Exception as error:
                text = f"{call.name}: the reference raised {type(error).__name__}: {error}"
                outcome.check(f"{text}; the call is at {places.of_case(spec, call.name)}", False)
                continue
            earlier: list[Any] = []
            before = _memories(spec, call.values(profile.device))
            for pattern in PATTERNS:
                values = call.values(profile.device)
                try:
                    with poisoned(pattern):
                        result = serving.run(values)
                except Exception as error:
                    text = f"{level} {call.name}: the kernel raised {type(error).__name__}: {error}"
                    outcome.check(f"{text}; it is at {places.of_function(spec, serving.function)}", False)
                    break
                problem = difference(spec, result, expected, values, truth)
                if not all(map(torch.equal, _memories(spec, values), before)):
                    problem = problem or "the memory of an argument was written"
                if problem is not None:
                    problem = f"{problem}; the kernel is at {places.of_function(spec, serving.function)}"
                outcome.check(f"{level} {call.name}", problem)
                again = any(shares_memory(result, other) for other in earlier)
                outcome.check(f"{level} {call.name}: lies in the memory of an earlier result", not again)
                earlier.append(result)
        outcome.check(f"{level}{of}: the kernel takes none of the cases", taken > 0)
        outcome.facts[f"{level}{of}"] = f"{taken} cases"


def _memories(spec: OperatorSpec, values: list[Any]) -> list[torch.Tensor]:
    """The whole memory of each tensor argument that the operator may only read."""
    read = values[Semantics.IN_PLACE in spec.semantics :]
    return [memory_of(value) for value in read if isinstance(value, torch.Tensor) and value.layout is torch.strided]
