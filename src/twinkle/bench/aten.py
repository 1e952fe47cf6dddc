"""ATen operators by their own kernels and by PyTorch's, on the calls of each operator's ``benchmark.yaml``.

``python -m benchmarks.aten`` shows it; ``twinkle.aten.install("auto")`` goes by it.

The candidates of a case: ``native``; our kernel registered, named by what it is written in (``triton``, ``torch``);
where the call's route is another, what users get with the registration: ``native, routed``; our kernel ``direct``,
without PyTorch's dispatcher; ``native, delegated``, an override in Python that does nothing but call PyTorch's own, so
what no registration can do without; and ``flag_gems``, where it can be imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from twinkle.aten.harness.cases import Case, benchmark_cases
from twinkle.aten.harness.compare import difference, exact, shares_memory
from twinkle.aten.harness.listed import benchmark_file
from twinkle.aten.keys import DEFAULT_KEY, effective_keys
from twinkle.aten.modes import serving_in_mode
from twinkle.aten.registration import Registration, register
from twinkle.aten.routes import every_size
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.bench.clocks import Call, timed_both
from twinkle.bench.results import EVERYBODY, Result, measured, slower_us
from twinkle.naming import dtype_name
from twinkle.platforms import Platform
from twinkle.reasons import Reason

NATIVE = "native"
PEER = "flag_gems"
DIRECT = ", direct"
ROUTED = f"{NATIVE}, routed"
FLOOR = f"{NATIVE}, delegated"


def size_for(device: torch.device) -> str:
    """Which of the sizes in ``benchmark.yaml`` says something about speed there."""
    return "cpu" if device.type == "cpu" else "accelerator"


def measure(
    spec: OperatorSpec,
    platform: Platform,
    *,
    size: str,
    rounds: int,
    seconds: float,
    mode: str = "auto",
    peer: bool = True,
    floor: bool = False,
) -> Iterator[Result]:
    """The rows of all cases of an operator; a candidate that isn't timed has one with the reason.

    Args:
        platform: one that this machine has; its current device is measured.
        size: see :func:`twinkle.aten.harness.cases.benchmark_cases`.
        rounds: samples of each candidate, at most.
        seconds: about how long the rounds of one case may take, for all candidates together.
        mode: of the operator's registration, see :func:`twinkle.aten.install`.
        peer: whether FlagGems takes part.
        floor: whether what only delegates does.

    Raises:
        InputsError: its list of calls can't be used.
        RegistrationError: the operator can't be registered here.
    """
    why_not = _never_timed(spec)
    if why_not is not None:
        yield Result(f"aten/{spec.name}", EVERYBODY, "-", "-", note=why_not)
        return
    cases = zip(benchmark_cases(spec, size), benchmark_cases(spec, "quick"), strict=True)
    for case, small in cases:
        try:
            yield from _Timed(spec, platform, mode, case, small).rows(rounds, seconds, peer, floor)
        except torch.OutOfMemoryError:
            dtype = dtype_name(case.dtype)
            yield Result(f"aten/{case.name}", EVERYBODY, "-", dtype, note="the device's memory is too small for it")


def check_cases(spec: OperatorSpec) -> None:
    """Raises the errors of :func:`measure` that are known before anything is timed."""
    if _never_timed(spec) is None:
        list(benchmark_cases(spec, "quick"))


def _never_timed(spec: OperatorSpec) -> str | None:
    if spec.by_design is not None:
        return "it is not registered, by design"
    return None if benchmark_file(spec).exists() else f"there is no {benchmark_file(spec).name}"


def wins(rows: list[Result]) -> list[str]:
    """The cases in which our kernel, registered, is faster than native by more than the noise: p80 against p20.

    What counts is the device's time or the host's, whichever is longer. Not those whose route is native: there nobody
    gets it.
    """
    return [case for case, ours, native in _served(rows) if slower_us(ours, "p80") < slower_us(native, "p20")]


def loses(rows: list[Result]) -> list[str]:
    """Those in which it is slower by more than the noise."""
    return [case for case, ours, native in _served(rows) if slower_us(ours, "p20") > slower_us(native, "p80")]


def _served(rows: list[Result]) -> Iterator[tuple[str, Result, Result]]:
    """The cases that our kernel serves where the operator is registered, with its row and native's."""
    native = {(r.case, r.dtype): r for r in rows if r.ms and r.who == NATIVE}
    routed = {(r.case, r.dtype) for r in rows if r.who == ROUTED}
    for row in rows:
        # Ours has the name of what it is written in, which may be a platform's.
        if row.ms and row.who not in (NATIVE, ROUTED, FLOOR, PEER) and not row.who.endswith(DIRECT):
            case = row.case, row.dtype
            if case not in routed:
                yield " ".join(case), row, native[case]


class _Timed:
    """One case in one dtype."""

    def __init__(self, spec: OperatorSpec, platform: Platform, mode: str, case: Case, small: Case) -> None:
        self.spec, self.platform, self.mode, self.case, self.small = spec, platform, mode, case, small
        self.device = torch.device(platform.device_type)
        with every_size():
            self.serving = serving_in_mode(spec, platform, mode)
        self.values = case.values(self.device)

    def _operator(self, values: list[Any], function: Any = None) -> Call:
        """The call with its arguments bound, so that nothing but the call is timed."""
        return self.serving.arguments.call(functools.partial(functools.partial, function or self.spec.overload), values)

    def _as_users_get_it(self) -> Registration:
        return register(self.spec, DEFAULT_KEY, None, self.platform.name, self.mode)

    def _registered(self) -> Registration:
        with every_size():
            return self._as_users_get_it()

    def _is_routed(self) -> bool:
        with self._as_users_get_it() as registration:
            self._operator(self.case.values(self.device))()
        return registration.counts.kernel == 0

    @torch.no_grad()
    def rows(self, rounds: int, seconds: float, peer: bool, floor: bool) -> Iterator[Result]:
        """See :func:`measure`."""
        level = self.serving.level
        call = self._operator(self.values)
        calls: dict[str, Call] = {NATIVE: call}
        within: dict[str, Any] = {level: self._registered, ROUTED: self._as_users_get_it}
        if floor:
            calls[FLOOR] = call
            within[FLOOR] = functools.partial(delegating, self.spec, self.platform)
        problem = self._problem()
        if problem is not None:
            yield self._row(level, note=problem)
        else:
            direct = self._operator(self.values, self.serving.function)
            calls |= {level: call, f"{level}{DIRECT}": direct}
            if self._is_routed():
                calls[ROUTED] = call
        limits: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
        yield from self._timed(calls, within, limits)
        if peer:
            gems = _flag_gems()
            if isinstance(gems, Reason):
                yield self._row(PEER, note=str(gems))
                return
            try:
                with gems():  # it registers a thousand operators: once, not for each sample
                    found = list(self._timed({PEER: call}, {}, limits))
            except Exception as error:
                found = [self._row(PEER, note=str(Reason.of_error(error, "failed", "calling it")))]
            yield from found

    def _timed(self, calls: dict[str, Call], within: dict[str, Any], limits: dict[str, Any]) -> Iterator[Result]:
        samples = timed_both(calls, self.device, within=within, **limits)
        figures = {"traffic_mb": self._traffic_mb()}
        for who, times in samples.items():
            yield self._row(who, **measured(*times), figures=figures)

    def _problem(self) -> str | None:
        """Why our kernel isn't timed: it doesn't take the call, or computes something else."""
        refused = self.serving.refusal(self.values)
        if refused is not None:
            return f"native serves it: {refused}"
        # Where there isn't one right result, a small call is looked at: judging needs much memory.
        judged = self.spec.judge is not None or Semantics.ROUNDS in self.spec.semantics
        case = self.small if judged else self.case
        ours, theirs = case.values(self.device), case.values(self.device)
        with self._registered() as registration:
            result = self._operator(ours)()
        if registration.counts.kernel != 1:
            return f"native serves it: {', '.join(registration.counts.fallbacks)}"
        expected = self._operator(theirs)()
        if Semantics.ALLOCATES not in self.spec.semantics and _same(result, expected):  # on the device, which is fast
            return None
        truth = None
        if Semantics.ROUNDS in self.spec.semantics:
            reference = self.spec.home.load(self.spec.reference)
            truth = self.serving.arguments.call(reference, exact(case.values()))
        wrong = difference(self.spec, result, expected, ours, truth)
        return None if wrong is None else f"wrong result: {wrong}"

    def _traffic_mb(self) -> float:
        """Every element of an input read once, every element of the result written once."""
        if Semantics.ALLOCATES in self.spec.semantics:
            return 0.0
        written = self.values[0] if Semantics.IN_PLACE in self.spec.semantics else self._operator(self.values)()
        read = [value for value in self.values if value is not written]
        if isinstance(written, torch.Tensor) and any(shares_memory(written, value) for value in read):
            return 0.0
        moved = [written, *read]
        tensors = [value for value in moved if isinstance(value, torch.Tensor)]
        return round(sum(_distinct(t) * t.element_size() for t in tensors) / 1e6, 3)

    def _row(self, who: str, **fields: Any) -> Result:
        shape = "x".join(map(str, next(v.shape if isinstance(v, torch.Tensor) else v for v in self.values)))
        return Result(f"aten/{self.case.name}", who, shape or "scalar", dtype_name(self.case.dtype), **fields)


@contextlib.contextmanager
def delegating(spec: OperatorSpec, platform: Platform) -> Iterator[None]:
    """Meanwhile Python code that does nothing else calls PyTorch's own kernels, where ours would be registered."""
    keys = effective_keys(spec.overload, platform)
    native = {key: torch.library.get_kernel(spec.overload, key) for key in keys}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for key in keys:
                library.impl(spec.overload, _delegate(native[key]), key, with_keyset=True)
        yield
    finally:
        library._destroy()


def _delegate(native: Any) -> Callable[..., Any]:
    return lambda keyset, *args, **kwargs: native.call_boxed(keyset, *args, **kwargs)


def _same(result: Any, expected: Any) -> bool:
    if not isinstance(result, torch.Tensor):
        return False
    return result.dtype == expected.dtype and result.stride() == expected.stride() and torch.equal(result, expected)


def _distinct(tensor: torch.Tensor) -> int:
    """Of an expanded tensor, how many elements there are in memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


@functools.cache
def _flag_gems() -> Callable[[], AbstractContextManager[Any]] | Reason:
    if importlib.util.find_spec(PEER) is None:
        return Reason("no-package", f"the package {PEER} is not installed")
    try:
        return importlib.import_module(PEER).use_gems
    except Exception as error:  # it asks for its device when it is imported
        return Reason.of_error(error, "broken-package", f"importing {PEER}")
