"""The kernels of each op against what they replace: ``python -m benchmarks.ops --json FILE``.

The candidates of a case: ``hf``, the class or function of transformers itself; ``F.rms_norm`` where that exists; and
every backend of the op that this machine has, whether or not its ``accepts`` would take the site: what is refused for
being slower has to be measured somewhere. What can't run has a row with the reason.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.cases import CASES, Case, Shape, Subject, name, selection, sizes
from benchmarks.harness import (
    Call,
    Result,
    Run,
    SubmitClock,
    arguments,
    ceilings,
    clock_for,
    interleaved,
    percentiles,
    significant,
    table,
)
from benchmarks.verdict import verdict_of_file
from twinkle.kernel import registry
from twinkle.kernel.install import Kernel, kernel_for
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import availability, get_impl, load_impl
from twinkle.kernel.targets import Site, Target, resolve_target
from twinkle.reasons import Reason

NEVER = ("loopback", "refuse", "npu")
COMPILED = "inductor"


# --- who is measured --------------------------------------------------------------------------------------------------


def target_of(case: Case) -> Target:
    target = resolve_target(f"transformers.models.{case.target}")
    if not isinstance(target, Target):
        raise SystemExit(f"{case.target}: {target.reason}")
    return target


def site_of(case: Case, target: Target, module: nn.Module | None, device: torch.device, dtype: torch.dtype) -> Site:
    """The site that a kernel is loaded for, with its variant found out."""
    owner = target.owner if module is None else type(module)
    original = target.original if module is None else getattr(owner, target.attribute)
    site = Site(module, target.label, owner, target.attribute, original, device, dtype)
    variant = variant_of(registry.get_op(case.op).load_reference(), site, {})
    if isinstance(variant, Reason):
        raise SystemExit(f"{case.target}: {variant}")
    return dataclasses.replace(site, variant=variant)


def kernel_of(case: Case, backend: str, target: Target, site: Site) -> Kernel | Reason:
    """A backend's kernel for the site, loaded past ``accepts``; or why there is none on this machine."""
    impl = get_impl(case.op, backend)
    if isinstance(impl, Reason):
        return impl
    missing = availability(impl)
    loaded = missing or load_impl(impl, target, site)
    return loaded if isinstance(loaded, Reason) else kernel_for(target, site.original, loaded)


def candidates(case: Case, subject: Subject, target: Target, site: Site, compiled: bool) -> Iterator[tuple[str, Any]]:
    """``(who, a function of nothing that gives the result, or the Reason why there is none)``."""
    args = subject.call_args
    yield "hf", lambda: site.original(*args)
    for who, peer in subject.peers.items():
        yield who, lambda peer=peer: peer(*subject.args)
    for backend in registry.backends_of(case.op):
        if backend in NEVER or (backend == COMPILED and not compiled):
            continue
        kernel = kernel_of(case, backend, target, site)
        if isinstance(kernel, Reason):
            yield backend, kernel
            continue
        refused = kernel.accepts_call(*args) if kernel.accepts_call else None
        yield backend, Reason("refused", refused) if refused else lambda kernel=kernel: kernel.function(*args)


def wrong(result: Any, expected: Any) -> str | None:
    """Why a candidate is not worth timing: its result is far from the original's."""
    for ours, theirs in zip(tensors_of(result), tensors_of(expected), strict=True):
        error = torch.linalg.vector_norm(ours.float() - theirs.float()) / torch.linalg.vector_norm(theirs.float())
        if ours.shape != theirs.shape or not error < (2e-2 if theirs.element_size() < 4 else 1e-4):
            return f"its result is off by {float(error):.2g}"
    return None


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def forward(call: Call) -> None:
    with torch.no_grad():
        call()


def forward_backward(call: Call, leaves: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(tensors_of(call()), seeds)


def measure(
    run: Run, case: Case, shape: Shape, dtype: torch.dtype, *, seconds: float, rounds: int, compiled: bool, small: bool
) -> None:
    """Adds the rows of one case in one shape and dtype: forward, then forward and backward."""
    target = target_of(case)
    subject = case.make(target.original if target.kind == "function" else target.owner, shape, dtype, run.device)
    site = site_of(case, target, subject.module, run.device, dtype)

    def add(direction: str, who: str, **fields: Any) -> None:
        run.results.append(Result(f"{case.op}/{case.variant}/{direction}", who, sizes(shape), name(dtype), **fields))

    if compiled:
        torch._dynamo.reset()  # else the limit of recompilations is soon reached, and eager code is timed
    with torch.no_grad():
        expected = site.original(*subject.call_args)
    seeds = [torch.randn_like(t) for t in tensors_of(expected)]
    steps: dict[str, dict[str, Call]] = {"f": {}, "fb": {}}
    for who, call in candidates(case, subject, target, site, compiled):
        if isinstance(call, Reason):
            add("f", who, ms=None, note=str(call))
            continue
        f, fb = partial(forward, call), partial(forward_backward, call, subject.leaves, seeds)
        try:
            with torch.no_grad():
                why = wrong(call(), expected)
            fb()
        except Exception as error:
            why = str(Reason.of_error(error, "failed", "calling it"))
        if why is None:
            steps["f"][who], steps["fb"][who] = f, fb
        else:
            add("f", who, ms=None, note=why)
    clocks = {"": clock_for(run.device), "-submit": SubmitClock(run.device)}
    if not small or run.device.type != "cuda":
        del clocks["-submit"]
    for direction, calls in steps.items():
        for suffix, clock in clocks.items():
            for who, samples in interleaved(calls, clock, rounds=rounds, seconds=seconds / 2).items():
                add(direction + suffix, who, ms=percentiles(samples), samples=len(samples))


# --- the program ------------------------------------------------------------------------------------------------------


def report(run: Run) -> str:
    """A line per case, a column per candidate: median forward / forward and backward, and how many times hf's speed."""
    whos = list(dict.fromkeys(result.who for result in run.results if result.ms))
    medians = {(r.case, r.shape, r.dtype, r.who): r.ms["p50"] for r in run.results if r.ms}
    lines: list[tuple[str, ...]] = [("ms forward / f+b (times hf's speed)", "shape", "dtype", *whos)]
    for case, shape, dtype in dict.fromkeys((r.case, r.shape, r.dtype) for r in run.results if r.ms):
        if "/fb" in case:
            continue
        cells = []
        for who in whos:
            both = (case, case.replace("/f", "/fb"))
            pair = [(medians.get((c, shape, dtype, who)), medians.get((c, shape, dtype, "hf"))) for c in both]
            known = [(ours, theirs) for ours, theirs in pair if ours is not None and theirs is not None]
            times = " / ".join(significant(ours) for ours, _ in known)
            speed = "" if who == "hf" else " (" + " / ".join(significant(t / o) for o, t in known) + ")"
            cells.append(times + speed if known else "-")
        lines.append((case.replace("/f", "").replace("-submit", " host"), shape, dtype, *cells))
    notes: dict[str, list[str]] = {}
    for r in run.results:
        if r.note:
            notes.setdefault(f"{r.who}: {r.note}", []).append(r.case.partition("/")[0])
    return "\n".join([table(lines), *(f"{note} [{', '.join(dict.fromkeys(ops))}]" for note, ops in notes.items())])


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("ops", "Times the kernels of each op against what they replace.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument("--op", choices=sorted({case.op for case in CASES}), help="only this op")
    parser.add_argument("--budget", type=float, default=240.0, metavar="SECONDS", help="when to stop (default: 240)")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out: it takes most of the time")
    parser.add_argument("--verdict", metavar="FILE", help="measure nothing; say where FILE shows that torch's wins")
    options = parser.parse_args(argv)
    if options.verdict:
        print(verdict_of_file(options.verdict))
        return Run("ops", torch.device("cpu"))
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = {"quick": options.quick, "budget_s": options.budget}
    run = Run("ops", device, settings, ceilings(device, options.quick))
    begin = time.perf_counter()
    todo = selection("quick" if options.quick else device.type, options.op)
    for number, (case, shape, dtype, small) in enumerate(todo):
        left = options.budget - (time.perf_counter() - begin)
        label = f"{case.op}/{case.variant}/f"
        if left <= 0:
            run.results.append(Result(label, "hf", sizes(shape), name(dtype), None, note="out of time"))
            continue
        compiled = not (options.quick or options.no_inductor or small) and left > options.budget / 3
        seconds = min(6.0, left / (len(todo) - number) / 2)
        rounds = 3 if options.quick else 40
        print(f"[{number + 1}/{len(todo)}] {label} {shape} {dtype}", file=sys.stderr, flush=True)
        measure(run, case, shape, dtype, seconds=seconds, rounds=rounds, compiled=compiled, small=small)
    if options.json:
        run.write(options.json)
    print(report(run))
    return run


if __name__ == "__main__":
    main()
