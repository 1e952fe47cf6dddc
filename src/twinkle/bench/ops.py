"""The kernels of each op against what they replace.

The candidates of a case: ``hf``, the class or function of transformers itself; ``F.rms_norm`` where that exists; and
every backend of the op that this machine has, whether or not its ``accepts`` would take the site: what is refused for
being slower has to be measured somewhere. What can't run has a row with the reason; what computes something else at a
site that it refuses has the refusal, as no model would get it there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from twinkle.bench.cases import Case, Item, Subject, sizes, traffic_mb
from twinkle.bench.clocks import Call, timed_both
from twinkle.bench.results import EVERYBODY, ORIGINAL, Result, Run, measured
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, registry
from twinkle.kernel.install import Kernel, kernel_for
from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import availability, get_impl, load_impl, refusal
from twinkle.kernel.targets import Site, Target, resolve_target
from twinkle.naming import dtype_name
from twinkle.reasons import Reason

TEST_BACKENDS = ("loopback", "refuse")
COMPILED = "inductor"
WRONG = "wrong result: "
"""How the note of a candidate begins that computes something else than the original."""

OUT_OF_TIME = "out of time, a larger --budget gives more"

# --- who is measured --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Who is timed.

    Attributes:
        call: a function of nothing that gives the result, or the reason why there is none.
        floor: computes something else; nobody can be faster.
        declines: the directions in which the kernel, once installed, leaves a call of this size to the original.
        refuses: why the backend doesn't take the site; it may compute something else there.
    """

    who: str
    call: Call | Reason
    floor: bool = False
    declines: tuple[str, ...] = ()
    refuses: Reason | None = None


def path_of(case: Case) -> str:
    """The key of a mapping that the case is about."""
    return f"transformers.models.{case.target}" if "." in case.target else case.target


def site_of(case: Case, target: Target, subject: Subject, item: Item, device: torch.device) -> Site | Reason:
    """The site that a kernel is loaded for, with its variant found out."""
    if target.kind == "logical":
        reference = registry.get_op(case.op).load_reference()
        site = Site.of_op(target.label, reference.original, device, item.dtype)
        return dataclasses.replace(site, variant=variant_of(reference, site, {}))
    owner = target.owner if subject.module is None else type(subject.module)
    original = target.original if subject.module is None else getattr(owner, target.attribute)
    site = Site(subject.module, target.label, owner, target.attribute, original, device, item.dtype)
    variant = variant_of(registry.get_op(case.op).load_reference(), site, {})
    return variant if isinstance(variant, Reason) else dataclasses.replace(site, variant=variant)


def kernel_of(case: Case, backend: str, target: Target, site: Site) -> Kernel | Reason:
    """A backend's kernel for the site, loaded past ``accepts``; or why there is none on this machine."""
    impl = get_impl(case.op, backend)
    if isinstance(impl, Reason):
        return impl
    missing = availability(impl)
    loaded = missing or load_impl(impl, target, site)
    return loaded if isinstance(loaded, Reason) else kernel_for(target, site.original, loaded)


def candidates(case: Case, subject: Subject, target: Target, site: Site, item: Item, compiled: bool) -> list[Candidate]:
    """Everyone who is timed, and who can't be."""
    args = subject.call_args
    found = [Candidate(ORIGINAL, _original_of(site, subject))]
    found += [Candidate(who, partial(peer, *subject.args)) for who, peer in subject.peers.items()]
    if item.small:
        found += [Candidate(who, partial(floor, *subject.args), True) for who, floor in subject.floors.items()]
    for backend in registry.backends_of(case.op):
        if backend in TEST_BACKENDS or (backend == COMPILED and not compiled):
            continue
        kernel = kernel_of(case, backend, target, site)
        if isinstance(kernel, Kernel):
            impl = get_impl(case.op, backend)
            refuses = None if isinstance(impl, Reason) else refusal(impl, site)
            found.append(dataclasses.replace(_of_kernel(backend, kernel, args, subject.kwargs), refuses=refuses))
        else:
            found.append(Candidate(backend, kernel))
    return found


def _original_of(site: Site, subject: Subject) -> Call:
    return partial(subject.original or site.original, *subject.call_args)


def _of_kernel(backend: str, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Candidate:
    """A kernel; one that only declines for its size is timed all the same, to see whether it is right to decline."""
    if kernel.accepts_call is None:
        return Candidate(backend, partial(kernel.function, *args, **kwargs))
    with every_size():
        refused = kernel.accepts_call(*args, **kwargs)
    if refused is not None:
        return Candidate(backend, Reason("refused", refused))
    declines = []
    for direction, with_gradients in (("f", False), ("fb", True)):
        with torch.set_grad_enabled(with_gradients):
            if kernel.accepts_call(*args, **kwargs) is not None:
                declines.append(direction)
    return Candidate(backend, partial(kernel.function, *args, **kwargs), declines=tuple(declines))


def chosen_of(case: Case, site: Site, found: Sequence[Candidate], direction: str) -> str:
    """Who serves a call at the site under the default mapping: a backend, or the original."""
    choice = DEFAULT_KERNEL_CONFIG.get(path_of(case))
    if choice is None:  # the default mapping leaves it to the user
        return ORIGINAL
    assert isinstance(choice, KernelChoice)
    known = {candidate.who: candidate for candidate in found}
    for backend in choice.backends:
        impl = get_impl(case.op, backend)
        if isinstance(impl, Reason) or availability(impl) or refusal(impl, site):
            continue
        # A kernel that was loaded keeps its place and sends single calls back.
        candidate = known[backend]
        return ORIGINAL if isinstance(candidate.call, Reason) or direction in candidate.declines else backend
    return ORIGINAL


# --- measuring --------------------------------------------------------------------------------------------------------


def wrong(result: Any, expected: Any) -> str | None:
    """Why a candidate is not worth timing: its result is far from the original's."""
    for ours, theirs in zip(tensors_of(result), tensors_of(expected), strict=True):
        if ours.shape != theirs.shape:
            return f"{WRONG}its shape is {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        error = torch.linalg.vector_norm(ours.float() - theirs.float()) / torch.linalg.vector_norm(theirs.float())
        if not error < (2e-2 if theirs.element_size() < 4 else 1e-4):
            return f"{WRONG}off by {float(error):.2g}"
    return None


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """The result of a call as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def forward(call: Call) -> None:
    """One sample of the direction ``f``."""
    with torch.no_grad():
        call()


def forward_backward(call: Call, leaves: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
    """One sample of the direction ``fb``."""
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(tensors_of(call()), seeds)


def measure(item: Item, device: torch.device, *, seconds: float, rounds: int, compiled: bool) -> list[Result]:
    """The rows of one case in one shape and dtype: forward, then forward and backward.

    Args:
        seconds: about how long the rounds may take, for all candidates together.
        rounds: how many samples at most.
        compiled: whether the backend ``inductor`` takes part.
    """
    case = item.case

    def row(direction: str, who: str, **fields: Any) -> Result:
        return Result(f"{case.op}/{case.variant}/{direction}", who, sizes(item.shape), dtype_name(item.dtype), **fields)

    target = resolve_target(path_of(case))
    if not isinstance(target, Target):
        return [row("f", ORIGINAL, note=str(target.reason))]
    subject = case.make(target.original if target.kind == "function" else target.owner, item.shape, item.dtype, device)
    site = site_of(case, target, subject, item, device)
    if isinstance(site, Reason):
        return [row("f", ORIGINAL, note=str(site))]
    if compiled:
        torch._dynamo.reset()  # else the limit of recompilations is soon reached, and eager code is timed
    with torch.no_grad():
        expected = _original_of(site, subject)()
    seeds = [torch.randn_like(t) for t in tensors_of(expected)]
    everyone = candidates(case, subject, target, site, item, compiled)
    rows: list[Result] = []
    calls: dict[str, dict[str, Call]] = {"f": {}, "fb": {}}
    for candidate in everyone:
        steps = _steps(candidate, expected, subject.leaves, seeds)
        if isinstance(steps, str):
            rows.append(row("f", candidate.who, note=steps))
        else:
            calls["f"][candidate.who], calls["fb"][candidate.who] = steps
    floors = {candidate.who for candidate in everyone if candidate.floor}
    for direction, of_direction in calls.items():
        chosen = chosen_of(case, site, everyone, direction)
        timed = timed_both(of_direction, device, rounds=rounds, seconds=seconds / 2, host=item.small)
        figures = {"traffic_mb": round(traffic_mb(case.op, item.shape, item.dtype, direction), 3)}
        for who, (ms, host_ms) in timed.items():
            fields = measured(ms, ms if item.small and host_ms is None else host_ms)
            own = {"floor": 1.0} if who in floors else figures
            rows.append(row(direction, who, **fields, chosen=who == chosen, figures=own))
    return rows


def _steps(
    candidate: Candidate, expected: Any, leaves: list[torch.Tensor], seeds: list[torch.Tensor]
) -> tuple[Call, Call] | str:
    """A candidate's forward and its forward and backward, each run once; or why it is not timed."""
    if isinstance(candidate.call, Reason):
        return str(candidate.call)
    f, fb = partial(forward, candidate.call), partial(forward_backward, candidate.call, leaves, seeds)
    try:
        with torch.no_grad():
            why = None if candidate.floor else wrong(candidate.call(), expected)
        fb()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return str(Reason.of_error(error, "failed", "calling it"))
    return str(candidate.refuses or why) if why else (f, fb)


Progress = Callable[[int, int, str], None]


def measure_all(
    run: Run, items: Sequence[Item], *, budget: float, quick: bool, compiled: bool, progress: Progress
) -> None:
    """Adds the rows of all items to a run; what there was no time for has a row that says so.

    Args:
        budget: seconds. The last third of it is for those who need no compiler.
        progress: called with how many items are done, how many there are, and what comes next.
    """
    begin = time.perf_counter()
    for number, item in enumerate(items):
        left = budget - (time.perf_counter() - begin)
        label = f"{item.case.op}/{item.case.variant}"
        progress(number, len(items), f"{label} {sizes(item.shape)} {dtype_name(item.dtype)}")
        if left <= 0:
            run.results.append(_skipped(item, OUT_OF_TIME))
            continue
        wants_compiler = compiled and not (quick or item.small)
        in_time = left > budget / 3
        run.results += _measured(
            item,
            run.device,
            seconds=min(6.0, left / (len(items) - number) / 2),
            rounds=3 if quick else 40,
            compiled=wants_compiler and in_time,
        )
        if wants_compiler and not in_time:
            run.results.append(_skipped(item, OUT_OF_TIME, COMPILED))
    progress(len(items), len(items), "done")


def _measured(item: Item, device: torch.device, **settings: Any) -> list[Result]:
    try:
        return measure(item, device, **settings)
    except torch.OutOfMemoryError:
        return [_skipped(item, "the device's memory is too small for it")]


def _skipped(item: Item, why: str, who: str = EVERYBODY) -> Result:
    case = f"{item.case.op}/{item.case.variant}/f"
    return Result(case, who, sizes(item.shape), dtype_name(item.dtype), note=why)
