"""``twinkle-kernel verify``: a kernelized model against the original, each entry alone and all together."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import first_line, print_json, progress, quiet_logs, show_parts, stdout, write_page
from twinkle.commands.models import check_memory, find_model
from twinkle.commands.options import check_files, mapping_for, parse_chain, parse_device, parse_dtype
from twinkle.document import GAP, Bar, BarChart, Part, Table, Text
from twinkle.exits import FAILED, FINE, NOTHING_RUN
from twinkle.kernel.report_text import reasons, short, unimplemented_line
from twinkle.naming import dtype_name

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress
    from torch import nn

OK, OFF, NOT_CALLED, NOT_INSTALLED, UNDECIDED = "ok", "off", "not called", "not installed", "undecided"
ALL = "all together"

INPUTS = 3
"""Inputs that a kernel is judged on. A kernel as exact as the original is beyond twice its error now and then, by
chance alone; what is off is off for most inputs. So what counts is the median over the inputs, tensor by tensor."""

MORE_INPUTS = 9
"""Inputs that a tensor is judged on anew when its median is over the limit, but not by much.

A deep model has hundreds of tensors, and the largest of their medians is over the limit by chance. Measured for kernels
as exact as the original, in 36 and 48 layers of fp32, single tensors are beyond it for up to one input in eight: so for
two of three once in 23 times, for five of nine once in 400. The first inputs don't count again: they made it a suspect.
"""

SURE = 2.0
"""A median over this is off at once: none of those tensors got there by chance, for any of 45 inputs."""

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


def run(
    model: str,
    *,
    device: str | None,
    dtype: str | None,
    backends: Sequence[str] | None,
    layers: int | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Prints the verdicts; the exit code is 1 when something is off, 3 when nothing was verified, else 0.

    Raises:
        CommandError: there is no such model, device, dtype or backend, the model is too large for this machine, or the
            page can't be written.
    """
    chain = parse_chain(backends)
    chosen = parse_dtype(dtype or "float32")
    source = find_model(model)
    where, how = parse_device(device, present=True)
    assert chosen is not None
    check_files({"--html": html})
    with progress(as_json) as bar, quiet_logs():
        task = bar.add_task(f"building {model}", total=None)
        if source.preset is None:
            # Two models with gradients and one more, and one in fp64 with its gradients.
            check_memory(source, chosen, where, layers, 5 * chosen.itemsize + 2 * 8, "comparing needs about")
        original = source.with_random_weights(chosen, where, layers)
        outcomes = compare(original, mapping_for(chain), bar)
        bar.remove_task(task)
    code = exit_code(outcomes)
    name = dtype_name(chosen)
    if as_json:
        facts = {"model": model, "device": where, "dtype": name, "ok": code == FINE}
        print_json(facts | {"entries": [asdict(outcome) for outcome in outcomes]})
    said = [
        Text(f"{model}: {type(original).__name__} with random weights, {name} on {where} ({how})", "bold"),
        GAP,
        *parts(outcomes),
        GAP,
        Text(conclusion(outcomes, where, model, chain)),
    ]
    if not as_json:
        show_parts(stdout(), said)
    if html is not None:
        write_page(html, f"Do the kernels agree with the original in {model}?", said, silent=as_json)
    return code


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

    The median of :data:`INPUTS` inputs; for a tensor for which that is over 1, but at most :data:`SURE`, the median of
    :data:`MORE_INPUTS` others. Empty when there are no comparable inputs.
    """
    inputs = comparable_inputs(original, kernelized)
    used = _medians(original, kernelized, itertools.islice(inputs, INPUTS))
    suspects = {name for name, share in used.items() if share > 1}
    if suspects and max(used.values()) <= SURE:
        anew = _medians(original, kernelized, itertools.islice(inputs, MORE_INPUTS))
        used |= {name: share for name, share in anew.items() if name in suspects}
    return used


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
    from twinkle.kernel.exact import KeepFloat64, exact_copy, exact_inputs
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
                with KeepFloat64():
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


def exit_code(outcomes: list[Outcome]) -> int:
    """1: something is off; 3: no kernel was verified; 0: all that were installed are fine."""
    verdicts = [outcome.verdict for outcome in outcomes]
    return FAILED if OFF in verdicts else FINE if OK in verdicts else NOTHING_RUN


def conclusion(outcomes: list[Outcome], device: str, model: str, chain: Sequence[str] = ()) -> str:
    """The last line; ``chain`` are the backends that were asked for."""
    if not any("." in outcome.target for outcome in outcomes):  # else only what concerns every model, such as sdpa
        return (
            "Nothing was verified: no entry of the default mapping names a part of this model; "
            f"`twinkle-kernel plan {model}` lists what no entry covers."
        )
    counted = {
        verdict: sum(o.verdict == verdict for o in outcomes if o.target != ALL and not o.unimplemented)
        for verdict in (OK, OFF, UNDECIDED, NOT_CALLED, NOT_INSTALLED)
    }
    if exit_code(outcomes) == NOTHING_RUN:
        asked = "inductor" in chain
        remedy = "" if asked else "; --backend inductor verifies it with kernels for any device that has a compiler"
        return f"Nothing was verified: no kernel of these chains could be installed and called on {device}{remedy}."
    line = ", ".join(f"{count} {verdict}" for verdict, count in counted.items() if count)
    return f"Entries: {line}. All together: {outcomes[-1].verdict}."


STYLES = {OFF: "red", NOT_INSTALLED: "dim", NOT_CALLED: "yellow", UNDECIDED: "yellow"}
COLUMNS = ("entry", "backend", "sites", "calls", "worst tensor", "used", "verdict")


def parts(outcomes: list[Outcome]) -> list[Part]:
    """One line per outcome, and the reasons; entries that nobody has written a backend for yet share a line."""
    shown = [outcome for outcome in outcomes if not outcome.unimplemented]
    styles = [STYLES.get(outcome.verdict, "") for outcome in shown]
    found: list[Part] = [*_chart(shown)]
    found.append(Table(COLUMNS, [_cells(o) for o in shown], ("sites", "calls", "used"), styles, word="verdict"))
    waiting = unimplemented_line([row for outcome in outcomes for row in outcome.rows])
    used = (
        f"used: share of the allowed error that the worst tensor uses, median of {INPUTS} inputs; where that "
        f"is between 100% and {SURE:.0%}, of {MORE_INPUTS} others"
    )
    found += [Text(waiting, "dim"), Text(used, "dim")]
    for outcome in outcomes:
        if outcome.reason:
            found.append(Text(f"{short(outcome.target)}: {outcome.reason}", "red" if outcome.verdict == OFF else ""))
    return found + reasons([row for outcome in shown for row in outcome.rows])


def _chart(outcomes: list[Outcome]) -> Iterator[BarChart]:
    bars = [
        Bar(short(o.target), o.used, f"{percent(o.used)}, {o.verdict}", style=STYLES.get(o.verdict, ""))
        for o in outcomes
        if o.used is not None
    ]
    if bars:
        legend = f"dashed: the limit; no bar is drawn longer than {SURE:.0%}"
        yield BarChart("Share of the allowed error that the worst tensor uses", bars, legend, limit=1.0, ends=SURE)


def percent(used: float) -> str:
    """``0.987`` -> ``99%``; rounded up near 1, so that what is over the limit never reads as 100 %."""
    return f"{math.ceil(used * 1000) / 1000:.1%}" if 1 < used < 1.1 else f"{used:.0%}"


def _cells(outcome: Outcome) -> tuple[str, ...]:
    measured = outcome.used is not None
    return (
        short(outcome.target),
        ", ".join(outcome.backends) or "-",
        str(outcome.sites) if measured else "-",
        str(outcome.calls) if measured else "-",
        (outcome.worst or "-").removeprefix("gradient of ").removeprefix("model.").removesuffix(".weight"),
        percent(outcome.used) if outcome.used is not None else "-",
        outcome.verdict,
    )
