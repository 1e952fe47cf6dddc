"""The kernel level: each kernel called directly, beside the operator's CPU reference."""

from __future__ import annotations

from typing import Any

from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.compare import difference, exact, shares_memory
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import PATTERNS, poisoned
from twinkle.aten.profiles import Profile
from twinkle.aten.serving import Serving, triton_missing
from twinkle.aten.spec import OperatorSpec, Semantics


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """Every case by every kernel that runs on the device, with everything that it allocates poisoned.

    An element that isn't written keeps the poison and can't be right for all patterns. A result of an earlier call
    can't be right either: a case's seeds differ; and no result may lie in an earlier one's memory.
    """
    outcome = started(spec, "kernel", profile)
    if outcome.not_run is None:
        for each in filter(None, (spec, spec.companion)):
            _check(outcome, each, profile)
    return outcome


def _check(outcome: Outcome, spec: OperatorSpec, profile: Profile) -> None:
    reference = spec.home.load(spec.reference)
    of = "" if spec.name == outcome.operator else f" of {spec.name}"
    for level in spec.kernels:
        missing = triton_missing(profile.found) if level == "triton" else None
        if missing is not None:
            outcome.facts[f"{level}{of}"] = f"not run: {missing}"
            continue
        serving = Serving(spec, profile.found, level, routed=False)
        taken = 0
        for case in cases(spec):
            if serving.refusal(case.values(profile.device)) is not None:
                continue
            taken += 1
            expected = serving.arguments.call(reference, case.values())
            truth = None
            if Semantics.ROUNDS in spec.semantics:
                truth = serving.arguments.call(reference, exact(case.values()))
                expected = serving.arguments.call(spec.native, case.values())
            earlier: list[Any] = []
            for pattern in PATTERNS:
                values = case.values(profile.device)
                with poisoned(pattern):
                    result = serving.run(values)
                outcome.check(f"{level} {case.name}", difference(spec, result, expected, values, truth))
                again = any(shares_memory(result, other) for other in earlier)
                outcome.check(f"{level} {case.name}: lies in the memory of an earlier result", not again)
                earlier.append(result)
        outcome.check(f"{level}: the kernel takes none of the cases", taken > 0)
        outcome.facts[f"{level}{of}"] = f"{taken} cases"
