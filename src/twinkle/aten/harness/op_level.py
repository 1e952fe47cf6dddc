"""The op level: the operator called through PyTorch, before, while and after its kernel is registered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.errors import NotRegistrableError
from twinkle.aten.harness import places
from twinkle.aten.harness.cases import Case, cases
from twinkle.aten.harness.observe import Call, Seen, differences
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.remembered import kinds_of_calls, looks_at_more
from twinkle.aten.harness.unlisted import number_calls, refused_calls
from twinkle.aten.profiles import Profile
from twinkle.aten.registration import Registration
from twinkle.aten.routes import every_size
from twinkle.aten.serving import Serving, best_level
from twinkle.aten.spec import Condition, OperatorSpec, Semantics

CONTEXTS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "with gradients": lambda device_type: torch.enable_grad(),
    "no_grad": lambda device_type: torch.no_grad(),
    "inference_mode": lambda device_type: torch.inference_mode(),
    "autocast": lambda device_type: torch.autocast(device_type, torch.bfloat16),
}
"""In each of these the kernel must be reached."""


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """Everything that a caller could notice is as natively, and the kernel served what its conditions allow."""
    with every_size():
        return _run(spec, profile)


def _run(spec: OperatorSpec, profile: Profile) -> Outcome:
    outcome = started(spec, "op", profile)
    if outcome.not_run is None and spec.by_design is not None:
        _check_by_design(outcome, spec, profile)
    elif outcome.not_run is None:
        facts = [_check(outcome, each, profile) for each in spec.parts]
        outcome.facts = facts[0] if len(facts) == 1 else {**facts[0], str(spec.companion): facts[1]}
    return outcome


def _check(outcome: Outcome, spec: OperatorSpec, profile: Profile) -> dict[str, Any]:
    kernels = _kernels(spec, profile)
    native = {call.name: _seeded(call, enter, _operator(spec)) for call, enter, _ in _calls(spec, profile)}
    truth = _exact(spec, profile, native)
    prepared = list(_calls(spec, profile))
    kernel = Serving(spec, profile.found).function
    counter: dict[str, int] = {}
    ours: dict[str, Seen] = {}
    served: dict[str, list[str]] = {}
    with spec.register_a1(profile.dispatch_key, counter, profile.platform) as registration:
        for call, enter, _ in prepared:
            ours[call.name] = _seeded(call, enter, _Watch(spec, registration, served.setdefault(call.name, [])))
    reached = counter["n"]
    for call, _, expected in prepared:  # only now, since comparing calls operators too
        found = differences(spec, ours[call.name], native[call.name], truth.get(call.name))
        if found and native[call.name].error is not None:
            found.append(f"the kernel must not take it: {places.of_declaration(spec, 'conditions')}")
        outcome.check(call.name, _joined(found))
        by = served[call.name]
        wrong = f"{call.name}: served by {by}, should be one of {expected}"
        if "delegated" in by:
            wrong += f"; the kernel, which calls the operator itself, is at {places.of_function(spec, kernel)}"
        outcome.check(wrong, by in expected)
    outcome.check("no call reached the kernel", registration.counts.kernel > 0)
    device = torch.device(profile.device)
    kinds = kinds_of_calls(spec, device)
    for condition in _conditions(spec, profile):
        text = f"the condition {condition.code!r} looks at more than the layout, so it has to say each_time=True"
        outcome.check(text, not looks_at_more(condition, device, kinds))
    _check_finite_differences(outcome, spec, profile)
    with contextlib.suppress(Exception):  # that is noted above
        _operator(spec)(next(cases(spec)).values(profile.device))
    outcome.check("a call was counted after close()", counter["n"] == reached)
    outcome.check("another kernel than before stands there after close()", _kernels(spec, profile) == kernels)
    if registration.derivative is not None:
        outcome.check("the derivative's kernel served no gradient", registration.derivative.counts.kernel > 0)
    return {
        "kernel": registration.counts.kernel,
        "fallbacks": dict(registration.counts.fallbacks),
        "level": registration.level,
        "keys": list(registration.keys),
    }


def _check_by_design(outcome: Outcome, spec: OperatorSpec, profile: Profile) -> None:
    """It is refused, with nothing changed; and called directly it does what PyTorch's own does."""
    kernels = _kernels(spec, profile)
    for platform in (None, profile.platform):
        try:
            registration = spec.register_a1(profile.dispatch_key, platform=platform)
        except NotRegistrableError as error:
            outcome.check("the reason isn't told", str(spec.by_design) in str(error))
        else:
            registration.close()
            outcome.check("it was registered", False)
    outcome.check("another kernel than before stands there", _kernels(spec, profile) == kernels)
    arguments, serving = Arguments(spec.overload), Serving(spec, profile.found)
    taken = sum(serving.refusal(case.values(profile.device)) is None for case in cases(spec, seeds=1))
    native = {call.name: _seeded(call, enter, _operator(spec)) for call, enter, _ in _calls(spec, profile)}
    for call, enter, _ in _calls(spec, profile):
        ours = _seeded(call, enter, lambda values: arguments.call(spec.aten, values))
        outcome.check(call.name, _joined(differences(spec, ours, native[call.name])))
    outcome.check("the kernel takes none of the cases", taken > 0)
    outcome.facts = {"kernel": taken, "level": serving.level, "registered": "never, by design"}


def _conditions(spec: OperatorSpec, profile: Profile) -> tuple[Condition, ...]:
    return (*spec.conditions, *spec.kernels[best_level(spec, profile.found)].conditions, *spec.routing)


Enter = Callable[[], AbstractContextManager[Any]]


def _calls(spec: OperatorSpec, profile: Profile) -> Iterator[tuple[Call, Enter, list[list[str]]]]:
    """Each case in each context, a call beyond each condition, and what no author lists; with whom may serve it."""
    serving = Serving(spec, profile.found)
    device = torch.device(profile.device)
    for case in cases(spec, seeds=1):
        refusal = serving.refusal(case.values(device))
        for context, enter in CONTEXTS.items():
            differentiate = context == "with gradients" and Semantics.ALLOCATES not in spec.semantics
            call = Call.of(f"{case.name}, {context}", case.values(device), spec, differentiate=differentiate)
            yield call, functools.partial(enter, device.type), [[refusal or "kernel"]]
    conditions = _conditions(spec, profile)
    for condition in conditions:
        try:
            arguments = list(condition.beyond(device))
        except NotImplementedError:
            continue  # the device has no such tensors
        call = Call.of(f"not that {condition.text}", arguments, spec, differentiate=False)
        # Some calls are never dispatched to this key: then nobody counts them. Lazy bits may be resolved before, and a
        # sparse tensor's own kernel may call the operator on its values: then it is another call.
        others = [["kernel"], *([other.code] for other in conditions)]
        sparse = torch._C._dispatch_has_kernel_for_dispatch_key(
            spec.overload.name(), f"Sparse{profile.found.dispatch_key}"
        )
        resolved = others if condition.code == "lazy-bits" or (condition.code == "layout" and sparse) else []
        yield call, torch.enable_grad, [[condition.code], [], *resolved]
    for name, numbered in number_calls(spec, device):
        yield Call.of(name, numbered, spec, differentiate=False), torch.enable_grad, [["number"], []]
    for name, refused in refused_calls(spec, device):
        call = Call.of(name, refused, spec, differentiate=False)
        # A kernel may find it out itself, as long as it raises what PyTorch does.
        yield call, torch.enable_grad, [[], ["error"], ["kernel"], *([other.code] for other in conditions)]


def _operator(spec: OperatorSpec) -> Callable[[list[Any]], Any]:
    """The operator through PyTorch's dispatcher, as a function of its arguments in the schema's order."""
    arguments = Arguments(spec.overload)
    return lambda values: arguments.call(spec.native, values)


def _joined(problems: list[str]) -> str | None:
    return "; ".join(problems) or None


def _exact(spec: OperatorSpec, profile: Profile, native: dict[str, Seen]) -> dict[str, Seen]:
    """By PyTorch's own kernels in fp64, for what rounds in an order of its own: the result or the gradients."""
    if not any(Semantics.ROUNDS in each.semantics for each in spec.parts):
        return {}
    found = {}
    for call, enter, _ in _calls(spec, profile):
        result = native[call.name].result
        if result is not None:
            found[call.name] = _seeded(call.in_fp64(spec, result.dtype), enter, _operator(spec))
    return found


def _seeded(call: Call, enter: Enter, function: Callable[[list[Any]], Any]) -> Seen:
    torch.manual_seed(0)
    with enter():
        return call.observe(function)


class _Watch:
    """The operator; notes who served the call: ``kernel``, ``error``, or the reasons for native."""

    def __init__(self, spec: OperatorSpec, registration: Registration, served: list[str]) -> None:
        self._call = _operator(spec)
        self._counts = registration.counts
        self._served = served

    def __call__(self, values: list[Any]) -> Any:
        before = self._counted()
        try:
            return self._call(values)
        finally:
            self._served += [who for who, n in self._counted().items() if n != before.get(who, 0)]

    def _counted(self) -> dict[str, int]:
        return {"kernel": self._counts.kernel, "error": self._counts.errors, **self._counts.fallbacks}


def _kernels(spec: OperatorSpec, profile: Profile) -> list[str]:
    keys = profile.found.dispatch_key, profile.found.autograd_key
    return [repr(torch.library.get_kernel(spec.overload, key)) for key in keys]


def _check_finite_differences(outcome: Outcome, spec: OperatorSpec, profile: Profile) -> None:
    """The gradient, and that of the gradient, of the cases that are marked for it; every call by the kernel."""
    serving = Serving(spec, profile.found)
    for case in cases(spec, seeds=1):
        if case.gradient and serving.refusal(case.values(profile.device)) is None:
            with spec.register_a1(platform=profile.platform) as registration:
                outcome.check(f"{case.name}: gradient", _finite_difference(case, profile.device, spec, registration))


def _finite_difference(case: Case, device: str, spec: OperatorSpec, registration: Registration) -> str | None:
    call = _operator(spec)
    arguments = case.values(device)
    reals = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor) and value.is_floating_point()]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # the same random numbers at each call
        given = list(arguments)
        for place, tensor in zip(reals, tensors, strict=True):
            given[place] = tensor
        if Semantics.IN_PLACE in spec.semantics:
            given[0] = given[0] * 1  # a leaf can't be written
        before = registration.counts.kernel
        result = call(given)
        if registration.counts.kernel == before:
            raise AssertionError(f"native served a call: {registration.counts.fallbacks}")
        return result

    inputs = [arguments[place].requires_grad_() for place in reals]
    try:
        torch.autograd.gradcheck(function, inputs)
        torch.autograd.gradgradcheck(function, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None
