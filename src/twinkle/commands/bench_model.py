"""``twinkle-kernel bench MODEL``: what each entry of the default mapping is worth for a model on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import (
    CommandError,
    answer,
    count,
    first_line,
    kept,
    progress,
    quiet_logs,
    write_page,
)
from twinkle.commands.models import ModelSource, check_memory, find_model
from twinkle.commands.options import check_files, parse_chain, parse_device, parse_dtype, parse_names
from twinkle.document import GAP, Part, Text
from twinkle.exits import FAILED, FINE, INTERRUPTED, NOTHING_RUN
from twinkle.naming import dtype_name
from twinkle.reasons import did_you_mean

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID

    from twinkle.bench.results import Run

BUDGET = 60.0
"""Seconds, where nothing else was asked for: most models are done before."""

PRESET_BATCH = (8, 256)
"""So much that a preset's norms, 64 channels wide, are not left to the original for their size."""

BATCHES = {"cpu": (1, 256), "accelerator": (4, 2048)}
"""Of models of real sizes: batch, length."""


@dataclass(frozen=True)
class Asked:
    """What is measured; ``batch``, ``length`` and ``budget`` are None where they are ours to choose."""

    model: str
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    layers: int | None
    batch: int | None
    length: int | None
    ops: Sequence[str]
    also: Sequence[str]
    budget: float | None


def run_model(
    model: str,
    *,
    device: str | None,
    dtype: str | None,
    layers: int | None,
    batch: int | None,
    length: int | None,
    ops: Sequence[str] | None,
    also: Sequence[str] | None,
    budget: float | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Measures and prints; the exit code is 1 when a kernel's loss is wrong, 3 when none could be installed.

    Raises:
        CommandError: there is no such model, device, dtype, op or backend, the model or its batch is too large for this
            machine, or a file can't be written.
    """
    from twinkle.bench.worth import OPT_IN
    from twinkle.kernel import registry

    if model in registry.ops():
        raise CommandError(f"{model!r} is an op, not a model: `twinkle-kernel bench --op {model}` times it")
    also, ops = parse_chain(also, "--also", OPT_IN), _parse_ops(ops)
    source = find_model(model)
    where, how = parse_device(device, present=True)
    chosen = parse_dtype(dtype or ("float32" if where == "cpu" else "bfloat16"))
    assert chosen is not None
    check_files({"--output": output, "--html": html})
    import torch

    asked = Asked(model, source, torch.device(where), chosen, layers, batch, length, ops, also, budget)
    measured, interrupted = _measure(asked, without_bar=as_json)
    said = _parts(measured, model, how)
    with kept("--output", output, measured.write, silent=as_json):
        answer(measured.to_dict(), said, as_json=as_json)
    write_page(html, f"What kernels gain in a training step of {model}", said, silent=as_json)
    return INTERRUPTED if interrupted else exit_code(measured)


def _parse_ops(names: Sequence[str] | None) -> list[str]:
    from twinkle.kernel import DEFAULT_KERNEL_CONFIG

    wanted = parse_names("--op", names)
    known = sorted({choice.op for choice in DEFAULT_KERNEL_CONFIG.values()})
    for name in wanted:
        if name not in known:
            raise CommandError(
                f"op {name!r} is none of the default mapping{did_you_mean(name, known)}; it has: {', '.join(known)}"
            )
    return wanted


def _measure(asked: Asked, *, without_bar: bool) -> tuple[Run, bool]:
    """What was measured, and whether the user had enough of it."""

    from twinkle.bench import worth
    from twinkle.bench.clocks import use
    from twinkle.bench.model import MOST_ROUNDS, ROUNDS, enough_seconds, measure, results, variants
    from twinkle.bench.results import Run

    interrupted = False
    with progress(without_bar) as bar, quiet_logs(), _told(asked):
        task = bar.add_task(f"building {asked.model}", total=None)
        use(asked.device)
        model = _build(asked)
        inputs, shape = _inputs(asked, model)
        everyone = variants(model, also=asked.also, ops=asked.ops)
        if len(everyone) > 1:
            next_up = partial(_next_up, bar, task)
            rounds = ROUNDS if asked.budget is None else MOST_ROUNDS
            seconds = asked.budget or BUDGET
            interrupted = measure(model, inputs, everyone, seconds=seconds, rounds=rounds, progress=next_up)
    measured = Run("model", asked.device, {**_settings(asked, model, shape), "enough_s": enough_seconds(everyone)})
    if len(everyone) > 1:
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        measured.results = results(everyone, shape, asked.dtype, tokens, asked.device)
    if interrupted:
        measured.settings["interrupted"] = True
    measured.conclusions = worth.conclude(measured.results).to_dict()
    return measured, interrupted


def _next_up(bar: Progress, task: TaskID, what: str) -> None:
    bar.update(task, description=what)


@contextmanager
def _told(asked: Asked) -> Iterator[None]:
    """What may go wrong with a model and its batch, as what the user can do about it."""
    import torch

    from twinkle.bench.model import OriginalFailed

    try:
        yield
    except torch.OutOfMemoryError:
        raise CommandError(
            f"{asked.model}: a training step needs more memory than {asked.device} has; give a smaller --batch, "
            "--length or --layers"
        ) from None
    except OriginalFailed as error:  # a model can have inputs of its own that nobody knows
        raise CommandError(
            f"{asked.model}: a training step can't be measured, {first_line(error)}; try another --batch or --length"
        ) from error


def _build(asked: Asked) -> Any:
    """The model in training mode, with random weights."""
    where, dtype = str(asked.device), asked.dtype
    if asked.source.preset is None:
        # A value and a gradient each. What a step holds besides depends on the batch.
        check_memory(asked.source, dtype, where, asked.layers, 2 * dtype.itemsize, "a training step takes more than")
    model = asked.source.with_random_weights(dtype, where, asked.layers).train()
    _without_cache(model)
    return model


def _without_cache(model: Any) -> None:
    """Training needs no cache of keys and values, and warnings about one neither."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _inputs(asked: Asked, model: Any) -> tuple[dict[str, torch.Tensor], str]:
    """A batch, and its shape for people: ``8x256``, or ``8`` where there are no tokens."""
    from twinkle import presets

    usual = PRESET_BATCH if asked.source.preset else BATCHES["cpu" if asked.device.type == "cpu" else "accelerator"]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or usual[1]
    batch, length = asked.batch or usual[0], asked.length or min(usual[1], longest)
    try:
        inputs = presets.inputs(model, batch=batch, length=length, device=asked.device)
    except ValueError as error:
        raise CommandError(f"{asked.model}: {first_line(error)}; give a larger --length") from None
    return inputs, f"{batch}x{length}" if "input_ids" in inputs else str(batch)


def _without_folders(argument: str) -> str:
    """MODEL as a result file may name it: of a path its last part, that of a config.json its folder's."""
    path = Path(argument).expanduser()
    if not path.exists():
        return argument
    return (path.resolve().parent if path.name == "config.json" else path.resolve()).name


def _settings(asked: Asked, model: Any, shape: str) -> dict[str, Any]:
    return {
        "model": _without_folders(asked.model),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype_name(asked.dtype),
        "shape": shape,
        "layers": asked.layers,
        "also": list(asked.also),
        "ops": list(asked.ops),
        "budget_s": asked.budget or BUDGET,
    }


def exit_code(measured: Run) -> int:
    """Of the results."""
    if not measured.results:
        return NOTHING_RUN
    from twinkle.bench import model

    return FAILED if any(row.note.startswith(model.FAILED) for row in measured.results) else FINE


def _parts(measured: Run, model: str, how: str) -> list[Part]:
    """What was measured, on what, and what came out."""
    from twinkle.bench import model_view, worth
    from twinkle.bench.results import device_name, packages

    facts = measured.settings
    size = f"{count(facts['parameters'])} parameters, {facts['dtype']}, batch {facts['shape']}"
    header: list[Part] = [
        Text(f"{model}: {facts['class']} with random weights, {size}", "bold"),
        Text(f"{device_name(measured.device)} ({how}); {packages()}", "bold"),
        GAP,
    ]
    if not measured.results:
        return [*header, Text(nothing(model, facts, str(measured.device)))]
    body = model_view.parts(measured.results, worth.conclude(measured.results), enough_s=facts["enough_s"])
    names = {part for row in measured.results for part in (*row.who.split("+"), row.case.removeprefix(worth.CASE))}
    absent = [name for name in facts["also"] if name not in names]
    tail = f"Of --also, nothing of {', '.join(absent)} can be installed in this model here." if absent else ""
    return [*header, *body, Text(tail)]


def nothing(model: str, facts: dict[str, Any], device: str) -> str:
    """Why there is nothing to measure, and what to do."""
    also = "" if facts["also"] else "; --also inductor measures what torch.compile can do"
    of_ops = f" for {', '.join(facts['ops'])}" if facts["ops"] else ""
    return (
        f"Nothing was measured: the default mapping installs no kernel{of_ops} in this model on {device}; "
        f"`twinkle-kernel plan {model}` says why{also}."
    )
