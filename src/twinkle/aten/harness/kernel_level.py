"""The kernel level: each kernel called directly, beside the operator's CPU reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import Case, cases
from twinkle.aten.harness.compare import difference, exact, shares_memory
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import PATTERNS, poisoned
from twinkle.aten.profiles import Profile
from twinkle.aten.serving import Serving, level_missing
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
        missing = level_missing(level, profile.found)
        if missing is not None:
            outcome.facts[f"{level}{of}"] = f"not run: {missing}"
            continue
        serving = Serving(spec, profile.found, level, routed=False)
        taken = 0
        for case in cases(spec):
            if serving.refusal(case.values(profile.device)) is not None:
                continue
            taken += 1
            try:
                expected, truth = _expected(spec, reference, case)
            except Exception as error:
                outcome.check(f"{case.name}: the reference raised {type(error).__name__}: {error}", False)
                continue
            earlier: list[Any] = []
            for pattern in PATTERNS:
                values = case.values(profile.device)
                try:
                    with poisoned(pattern):
                        result = serving.run(values)
                except Exception as error:
                    outcome.check(f"{level} {case.name}: the kernel raised {type(error).__name__}: {error}", False)
                    break
                outcome.check(f"{level} {case.name}", difference(spec, result, expected, values, truth))
                again = any(shares_memory(result, other) for other in earlier)
                outcome.check(f"{level} {case.name}: lies in the memory of an earlier result", not again)
                earlier.append(result)
        outcome.check(f"{level}: the kernel takes none of the cases", taken > 0)
        outcome.facts[f"{level}{of}"] = f"{taken} cases"


def _expected(spec: OperatorSpec, reference: Callable[..., Any], case: Case) -> tuple[Any, Any]:
    """What a result is compared with: the reference's; or PyTorch's own, and the reference's in fp64."""
    arguments = Arguments(spec.overload)
    if Semantics.ROUNDS not in spec.semantics:
        return arguments.call(reference, case.values()), None
    return arguments.call(spec.native, case.values()), arguments.call(reference, exact(case.values()))
