"""A kernelized model against the original, each entry alone and all together: what ``verify`` shows."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import first_line
from twinkle.kernel.judgement import after_second_look
from twinkle.kernel.report_text import short

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress
    from torch import nn

OK, OFF, NOT_CALLED, NOT_INSTALLED, UNDECIDED = "ok", "off", "not called", "not installed", "undecided"
ALL = "all together"

INPUTS = 3
"""Inputs that a kernel is judged on."""

MORE_INPUTS = 9
"""Inputs that a tensor is judged on anew when its median is over the limit, but not by much.

A deep model has hundreds of tensors, and the largest of their medians is over the limit by chance. Measured for kernels
as exact as the original, in 36 and 48 layers of fp32, single tensors are beyond it for up to one input in eight: so for
two of three once in 23 times, for five of nine once in 400.
"""

SEEDS = 30
"""Inputs that are tried for each of these for a mixture of experts, see :func:`comparable_inputs`."""


@dataclass
class Outcome:
    """One comparison.

    Attributes:
        target: the entry's target, or :data:`ALL`.
        verdict: ok; off (a tensor is outside the judgement, or the kernel raised); not called (the forward never
            reached it, so nothing was proved); not installed; undecided (see :func:`comparable_inputs`).
        backends: what serves.
        sites: how many instances (or functions) it serves.
        calls: how often it was called; compiled calls are not counted.
        worst: the tensor that is nearest to its limit.
        used: the share of the allowed error that it uses, see :func:`judge`; infinite for a wrong shape, dtype or
            non-finite value.
        reason: what it raised, or why calls were left to the original.
        rows: the entry's rows of the report, with the reasons why candidates were not chosen.
    """

    target: str
    verdict: str
    backends: list[str]
    sites: int = 0
    calls: int = 0
    worst: str | None = None
    used: float | None = None
    reason: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def unimplemented(self) -> bool:
        """Whether the entry waits for a backend that nobody has written yet."""
        return bool(self.rows) and all(row["unimplemented"] for row in self.rows)


def compare(original: nn.Module, mapping: Mapping[Any, Any], bar: Progress) -> list[Outcome]:
    """One outcome for each entry that concerns the model, and one for all of them together."""
    from twinkle.kernel.report import plan

    rows = [row for row in plan(original, mapping).rows if row.state not in ("unused", "missing")]
    entries = {row.target: {row.target: mapping[row.target]} for row in rows}
    entries[ALL] = {target: mapping[target] for target in entries}
    task = bar.add_task("comparing", total=len(entries))
    outcomes = []
    for target, entry in entries.items():
        bar.update(task, description=f"comparing {short(target)}")
        outcomes.append(compare_entry(original, target, entry))
        bar.advance(task)
    return outcomes


def compare_entry(original: nn.Module, target: str, mapping: Mapping[Any, Any]) -> Outcome:
    """Kernelizes a copy with some entries only and judges it against the original."""
    import torch

    from twinkle.kernel import kernelize
    from twinkle.kernel.report import report
    from twinkle.kernel.undo import unkernelize

    copied = copy.deepcopy(original)
    torch.compiler.reset()  # what earlier entries compiled counts against the limit on variants of one function
    try:
        kernelize(copied, mapping)
        rows = report(copied).rows
        installed = [row for row in rows if row.state == "installed"]
        outcome = Outcome(target, OK, list(dict.fromkeys(str(row.backend) for row in installed)))
        if target != ALL:
            outcome.rows = [row.to_dict() for row in rows]
        if not installed:
            outcome.verdict = NOT_INSTALLED
            return outcome
        outcome.sites = sum(row.instances or 0 for row in installed)
        used = judge(original, copied)
        if not used:
            outcome.verdict = UNDECIDED
            outcome.reason = f"rounding sends tokens to other experts, for each of {SEEDS} inputs"
            return outcome
        outcome.used, outcome.worst = max((share, name) for name, share in used.items())
        outcome.calls = sum(row.calls for row in installed)
        if outcome.used > 1:
            outcome.verdict = OFF
        elif not any(row.calls or row.counts.compiled for row in installed):
            outcome.verdict = NOT_CALLED
        fallbacks = {reason: count for row in installed for reason, count in row.fallbacks.items()}
        if fallbacks:
            outcome.reason = "; ".join(f"{count} calls by the original: {why}" for why, count in fallbacks.items())
        return outcome
    except Exception as error:  # a kernel that raises is off, not the end of the comparison
        return Outcome(target, OFF, [], reason=f"{type(error).__name__}: {first_line(error)}")
    finally:
        unkernelize(copied)


def judge(original: nn.Module, kernelized: nn.Module) -> dict[str, float]:
    """The share of the allowed error that each tensor uses: off when it is over 1.

    The median of :data:`INPUTS` inputs; for a tensor that has a second look, the median of :data:`MORE_INPUTS` others.
    Empty when there are no comparable inputs.
    """
    inputs = comparable_inputs(original, kernelized)

    def medians(number: int) -> dict[str, float]:
        return _medians(original, kernelized, itertools.islice(inputs, number))

    return after_second_look(medians(INPUTS), lambda: medians(MORE_INPUTS))


def _medians(original: nn.Module, kernelized: nn.Module, inputs: Iterable[dict[str, torch.Tensor]]) -> dict[str, float]:
    from twinkle import presets
    from twinkle.kernel.verify import compare_models

    used: dict[str, list[float]] = {}
    for given in inputs:
        for comparison in compare_models(original, kernelized, given, presets.loss):
            used.setdefault(comparison.name, []).append(comparison.used)
    return {name: statistics.median(shares) for name, shares in used.items()}


def comparable_inputs(original: nn.Module, kernelized: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs for which original, kernelized and fp64 model send every token to the same experts.

    Where rounding alone decides about an expert, results differ by whole experts, which says nothing about a kernel.
    Endless, but where :data:`SEEDS` in a row were none.
    """
    from twinkle import presets
    from twinkle.kernel.exact import exact_copy, exact_inputs, exactly
    from twinkle.kernel.journal import process_originals
    from twinkle.kernel.ops.worthwhile import every_size

    device = next(original.parameters()).device
    routers = any(_is_router(module) for module in original.modules())
    exact = exact_copy(original) if routers else original
    failed = 0
    for seed in itertools.count():
        if failed == SEEDS:
            return
        inputs = presets.inputs(original, seed=seed, device=device)
        if routers:
            with every_size():
                ours = _chosen_experts(kernelized, inputs)
            with process_originals():
                theirs = _chosen_experts(original, inputs)
                with exactly(original):
                    right = _chosen_experts(exact, exact_inputs(inputs))
            if not (_equal(ours, theirs) and _equal(theirs, right)):
                failed += 1
                continue
        failed = 0
        yield inputs


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router")


def _chosen_experts(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The experts that each router chooses for each token, as sorted indices ``[tokens, k]``."""
    chosen: list[torch.Tensor] = []

    def note(module: Any, args: Any, result: Any) -> None:
        results = result if isinstance(result, tuple) else (result,)
        chosen.extend(r.sort(dim=-1).values for r in results if hasattr(r, "dtype") and not r.is_floating_point())

    hooks = [module.register_forward_hook(note) for module in model.modules() if _is_router(module)]
    dtype = next(model.parameters()).dtype
    try:
        model(**{name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return chosen


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a.equal(b) for a, b in zip(one, other, strict=True))
