"""``twinkle-kernel bench``: the kernels of each op against what they replace, on this machine.

With a MODEL the work is in :mod:`twinkle.commands.bench_model`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import (
    CommandError,
    answer,
    first_line,
    kept,
    progress,
    quiet_logs,
    write_page,
)
from twinkle.commands.options import check_files, parse_device, parse_names
from twinkle.document import GAP, Part, Text
from twinkle.exits import FAILED, FINE, INTERRUPTED, NOTHING_RUN
from twinkle.reasons import did_you_mean

if TYPE_CHECKING:
    from twinkle.bench.results import Run

BUDGET = 120.0


def run(
    model: str | None, *, for_ops: Mapping[str, Any], for_models: Mapping[str, Any], budget: float | None, **both: Any
) -> int:
    """Times ops, or with a model what the default mapping is worth for it; returns the exit code.

    Args:
        for_ops: the options that only go without a model, by name; None for those that were not given.
        for_models: the options that only go with one.
        budget: None for the default.
        both: the other options.

    Raises:
        CommandError: an option doesn't go with or without a model, or see the function that is called.
    """
    for name, value in (for_models if model is None else for_ops).items():
        if value is not None:
            option = f"--no-{name}" if value is False else f"--{name}"
            remedy = f"name one: bench MODEL {option}" if model is None else "leave it out"
            raise CommandError(f"{option} goes {'only with' if model is None else 'without'} a MODEL; {remedy}")
    if model is None:
        quick, inductor = bool(for_ops["quick"]), for_ops["inductor"] is not False
        return run_ops(quick=quick, inductor=inductor, budget=budget or BUDGET, **both)
    from twinkle.commands.bench_model import run_model

    return run_model(model, budget=budget, **for_models, **both)


def run_ops(
    *,
    ops: Sequence[str] | None,
    device: str | None,
    budget: float,
    quick: bool,
    inductor: bool,
    output: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Measures and prints; the exit code is 1 when a kernel's result is wrong, 3 when nothing could be measured.

    Raises:
        CommandError: there is no such op or device, transformers is missing, or a file can't be written.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CommandError("bench times classes of transformers, which isn't installed: pip install transformers")
    chosen, how = parse_device(device, present=True)
    wanted = parse_ops(ops)
    check_files({"--output": output, "--html": html})
    measured, interrupted = _measure(chosen, wanted, budget=budget, quick=quick, inductor=inductor, without_bar=as_json)
    said = parts(measured, how)
    with kept("--output", output, measured.write, silent=as_json):
        answer(measured.to_dict(), said, as_json=as_json)
    write_page(html, "Kernels, op by op", said, silent=as_json)
    return INTERRUPTED if interrupted else exit_code(measured)


def parse_ops(names: Sequence[str] | None) -> list[str]:
    """The ops of ``--op``, which may be repeated and hold commas; all that have cases when it wasn't given.

    Raises:
        CommandError: an op that doesn't exist, or that nothing is measured for.
    """
    from twinkle.bench.cases import OPS
    from twinkle.kernel import registry

    wanted = parse_names("--op", names)
    for name in wanted:
        if name in OPS:
            continue
        if name in registry.ops():
            raise CommandError(f"op {name!r} has no benchmark yet; those that have: {', '.join(OPS)}")
        raise CommandError(f"unknown op {name!r}{did_you_mean(name, OPS)}; known: {', '.join(OPS)}")
    return list(dict.fromkeys(wanted)) or list(OPS)


def _measure(
    device: str, ops: list[str], *, budget: float, quick: bool, inductor: bool, without_bar: bool
) -> tuple[Run, bool]:
    """What was measured, and whether the user had enough of it."""
    import torch

    from twinkle.bench.cases import all_items, quick_items
    from twinkle.bench.clocks import ceilings, use
    from twinkle.bench.ops import measure_all
    from twinkle.bench.results import Run

    try:
        where = torch.device(device)
        use(where)
        torch.empty(1, device=where)
    except Exception as error:  # an index that isn't there, a driver that fails
        raise CommandError(
            f"no tensor can be made on {device}: {first_line(error)}; `twinkle-kernel info` lists what there is"
        ) from None
    measured = Run("ops", where, {"quick": quick, "budget_s": budget, "inductor": inductor and not quick})
    items = quick_items(ops) if quick else all_items(ops, where)
    with progress(without_bar) as bar, quiet_logs():
        task = bar.add_task("what this machine can do at best", total=len(items))

        def moved(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, description=label)

        try:
            measured.ceilings = {} if quick else ceilings(where)
            measure_all(measured, items, budget=budget, quick=quick, compiled=inductor, progress=moved)
        except KeyboardInterrupt:
            measured.settings["interrupted"] = True
            return measured, True
    return measured, False


def exit_code(measured: Run) -> int:
    """Of the results."""
    from twinkle.bench.ops import WRONG

    if any(result.note.startswith(WRONG) for result in measured.results):
        return FAILED
    return FINE if any(result.ms for result in measured.results) else NOTHING_RUN


def parts(measured: Run, how: str) -> list[Part]:
    """What was measured on, and what came out."""
    from twinkle.bench import view
    from twinkle.bench.results import device_name, packages

    found: list[Part] = [Text(f"{device_name(measured.device)} ({how}); {packages()}", "bold")]
    if measured.ceilings:
        best = "; ".join(f"{value:g} {_unit(name)}" for name, value in measured.ceilings.items())
        found.append(Text(f"at best: {best}", "dim"))
    copy_speed = measured.ceilings.get("copy_gb_per_s") if measured.device.type != "cpu" else None
    quick, left_out = measured.settings["quick"], not measured.settings["inductor"]
    found += [GAP, *view.parts(measured.results, copy_speed, quick=quick)]
    if left_out:
        found.append(Text(f"inductor was left out: {'--quick compiles nothing' if quick else 'as asked'}."))
    return found


def _unit(name: str) -> str:
    """``copy_gb_per_s`` -> ``GB/s (copy)``."""
    for ending, unit in (("_gb_per_s", "GB/s"), ("_tflop_per_s", "TFLOP/s")):
        if name.endswith(ending):
            return f"{unit} ({name.removesuffix(ending).replace('_', ' ')})"
    return name
