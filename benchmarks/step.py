"""A whole training step, forward, loss and backward: ``python -m benchmarks.step --json FILE``.

Each candidate runs in a fresh process, so that what one patches for a whole process is nobody else's, and with empty
compiler caches, so that its first step shows what a newcomer waits for. All have the same weights and the same batch;
a candidate whose loss is another one's is not reported as fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.alone import alone
from benchmarks.program import (
    arguments,
    device_option,
    figure_cells,
    finish,
    forget_peak,
    names_option,
    peak_memory,
    progress,
    start,
)
from benchmarks.trace import profiled
from benchmarks.workloads import DTYPE, QWEN3_MOE, QWEN3_SMALL, Workload, new_model, toy
from twinkle.bench.clocks import ceilings, synchronize, use
from twinkle.bench.ops import WRONG
from twinkle.bench.results import ORIGINAL, Result, Run, measured, significant, spread
from twinkle.bench.step import differs, timed, training_step
from twinkle.bench.view import factor
from twinkle.layout import plain, table, width_of_terminal
from twinkle.naming import dtype_name
from twinkle.reasons import Reason

# --- what is run ------------------------------------------------------------------------------------------------------

WORKLOADS = {workload.name: workload for workload in (QWEN3_SMALL, QWEN3_MOE)}


def _patch_liger(workload: Workload) -> None:
    """Liger's own way in, with everything it does by default, its fused loss included."""
    import liger_kernel.transformers as liger

    family = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", workload.family).lower()
    getattr(liger, f"apply_liger_kernel_to_{family}")()


def _no_liger() -> Reason | None:
    from twinkle.kernel.ops.liger_support import available

    usable, why = available()
    return None if usable else why


def _kernelize(model: Any, *opt_in: str) -> str:
    """Our default mapping, with opt-in entries; says what serves."""
    from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
    from twinkle.kernel.config import OPT_IN_KERNEL_CONFIG
    from twinkle.kernel.report import report

    mapping = {**DEFAULT_KERNEL_CONFIG, **{key: OPT_IN_KERNEL_CONFIG[key] for key in opt_in}}
    instances: dict[str, int] = {}
    for row in report(kernelize(model, mapping)).rows:
        if row.state == "installed":
            instances[f"{row.op} {row.backend}"] = instances.get(f"{row.op} {row.backend}", 0) + row.instances
    return ", ".join(f"{what} x{number}" for what, number in sorted(instances.items())) or "nothing was replaced"


def _with(*opt_in: str) -> Callable[[Any], str]:
    return lambda model: _kernelize(model, *opt_in)


_NORMS = ("fused_qk", "fused_add_norm")


@dataclass(frozen=True)
class Candidate:
    """A way to run the step.

    Attributes:
        before: called before the model is built.
        after: called with the model; what it returns is the row's note.
        compiled: whether the model goes through ``torch.compile``.
        missing: why it can't run on this machine, or None.
    """

    before: Callable[[Workload], None] | None = None
    after: Callable[[Any], str] | None = None
    compiled: bool = False
    missing: Callable[[], Reason | None] = lambda: None


# In the order in which they are measured: those that compile take the longest.
CANDIDATES: dict[str, Candidate] = {
    ORIGINAL: Candidate(),
    "twinkle": Candidate(after=_kernelize),
    "twinkle+fused": Candidate(after=_with(*_NORMS)),
    "twinkle+fused_ce": Candidate(after=_with("fused_ce")),
    "twinkle+fused+fused_ce": Candidate(after=_with(*_NORMS, "fused_ce")),
    "liger": Candidate(before=_patch_liger, missing=_no_liger),
    "compile": Candidate(compiled=True),
    "twinkle+compile": Candidate(after=_kernelize, compiled=True),
    "twinkle+fused_ce+compile": Candidate(after=_with("fused_ce"), compiled=True),
    "twinkle+fused+fused_ce+compile": Candidate(after=_with(*_NORMS, "fused_ce"), compiled=True),
}

# --- the process of one candidate -------------------------------------------------------------------------------------


def measure(who: str, workload: Workload, device: torch.device, *, seconds: float, compiler: str) -> Result:
    """A candidate's row, measured in this process.

    Args:
        seconds: about how long the timed steps may take.
        compiler: the backend of ``torch.compile``.
    """
    candidate = CANDIDATES[who]

    def row(**fields: Any) -> Result:
        return Result(f"step/{workload.name}", who, workload.shape, dtype_name(DTYPE), **fields)

    use(device)
    missing = candidate.missing()
    if missing is not None:
        return row(note=str(missing))
    shape = (workload.batch, workload.length)
    ids = torch.randint(0, workload.config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(device)
    if candidate.before:
        candidate.before(workload)
    model = new_model(workload, device)
    note = candidate.after(model) if candidate.after else ""
    call = torch.compile(model, backend=compiler) if candidate.compiled else model

    inputs = {"input_ids": ids, "labels": ids, "attention_mask": workload.mask}

    def step() -> torch.Tensor:
        return training_step(model, inputs, call)

    synchronize(device)
    begin = time.perf_counter()
    loss = float(step())
    synchronize(device)
    figures = {"loss": round(loss, 6), "first_step_s": round(time.perf_counter() - begin, 3)}
    for _ in range(2):
        step()
    synchronize(device)
    forget_peak(device)
    done, handed_over = _samples(step, device, seconds)
    fields = measured(done, handed_over)
    figures["tokens_per_s"] = round(workload.batch * workload.length / fields["ms"]["p50"] * 1e3, 1)
    figures |= peak_memory(device)
    if device.type != "cpu":
        figures |= profiled(step, device)
    if candidate.compiled:
        figures |= _compiled_figures()
    return row(**fields, figures=figures, note=note)


def _compiled_figures() -> dict[str, float]:
    """What the compiler had to do in this process: one graph and no break mean that nothing was compiled again."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}


def _samples(step: Callable[[], Any], device: torch.device, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds of each step until it is done, and until it is handed to the device: at least three, at most 30."""
    done, handed_over = [], []
    begin = time.perf_counter()
    while len(done) < 3 or (len(done) < 30 and time.perf_counter() - begin < seconds):
        for samples, ms in zip((done, handed_over), timed(step, device), strict=True):
            samples.append(ms)
    return done, handed_over


# --- the program ------------------------------------------------------------------------------------------------------


def run_alone(
    who: str, workload: Workload, device: torch.device, *, timeout: float, threads: int | None = None, **settings: Any
) -> Result:
    """A candidate's row, measured in a process of its own; with a note instead of figures when that fails.

    Args:
        timeout: seconds after which the process is ended.
        threads: CPU threads of PyTorch.
        settings: see :func:`measure`.
    """
    failed = Result(f"step/{workload.name}", who, workload.shape, dtype_name(DTYPE))
    asked = {"who": who, "workload": dataclasses.asdict(workload), "device": str(device), **settings}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        answer = Path(folder, "row.json")
        command = ["-m", "benchmarks.step", "--alone", json.dumps(asked), "--json", str(answer)]
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        note = alone([*command, *(["--threads", str(threads)] if threads else [])], caches, timeout, _why)
        return Result(**json.loads(answer.read_text())) if note is None else dataclasses.replace(failed, note=note)


def _why(code: int, said: str) -> str:
    last = [line.strip() for line in said.splitlines() if line.strip()][-1:] or ["it said nothing"]
    return f"its process ended with exit code {code}: {last[0][:200]}"


def checked(row: Result, original: Result | None) -> Result:
    """The row as it is, or without its times when its loss is not the original's."""
    loss, expected = (one.figures.get("loss") if one else None for one in (row, original))
    why = None if loss is None or expected is None else differs(loss, expected)
    return row if why is None else Result(row.case, row.who, row.shape, row.dtype, note=f"{WRONG}{why}")


COLUMNS = {
    "first_step_s": "first step, s",
    "gpu_busy_ms": "GPU busy, ms",
    "kernels": "kernels",
    "peak_memory_gb": "peak GB",
    "loss": "loss",
    "graphs": "graphs",
    "graph_breaks": "breaks",
}


def report(run: Run) -> str:
    """A line per candidate."""
    rows = {row.who: row for row in run.results if row.ms and row.host_us}
    lines = []
    for who, row in rows.items():
        assert row.ms and row.host_us
        speed = row.figures["tokens_per_s"]
        of_original = f" ({factor(speed / rows[ORIGINAL].figures['tokens_per_s'])})" if ORIGINAL in rows else ""
        host_ms = significant(row.host_us["p50"] / 1e3)
        lines.append((who, f"{speed:.0f}{of_original}", spread(row.ms), host_ms, *figure_cells(row, COLUMNS)))
    header = ("who", "tokens/s", "ms (p20 .. p80)", "submitted, ms", *COLUMNS.values())
    shown = plain(table(header, lines, width_of_terminal()))
    return "\n".join([shown, *(f"{row.who}: {row.note}" for row in run.results if row.note)])


def main(argv: list[str] | None = None) -> Run | None:
    """Runs the program; returns what it measured."""
    parser = arguments("step", "Times a whole training step of a model with random weights.")
    device_option(parser)
    parser.add_argument("--budget", type=float, default=240.0, metavar="SECONDS", help="when to stop (default: 240)")
    parser.add_argument(
        "--candidates",
        type=names_option(CANDIDATES),
        default=list(CANDIDATES),
        metavar="NAME,...",
        help=f"only these, in this order (default: {','.join(CANDIDATES)})",
    )
    parser.add_argument(
        "--model", choices=list(WORKLOADS), default=QWEN3_SMALL.name, help=f"default: {QWEN3_SMALL.name}"
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the process of one candidate
    options = parser.parse_args(argv)
    device = start(options)
    if options.alone:
        asked = json.loads(options.alone)
        workload, device = Workload(**asked.pop("workload")), torch.device(asked.pop("device"))
        row = measure(asked.pop("who"), workload, device, **asked)
        Path(options.json).write_text(json.dumps(dataclasses.asdict(row)))
        return None
    workload = toy(WORKLOADS[options.model]) if options.quick else WORKLOADS[options.model]
    # Toys are too small for the machine code to matter: what is tried is whether everything runs.
    settings = {"seconds": 0.0, "compiler": "aot_eager"} if options.quick else {"seconds": 5.0, "compiler": "inductor"}
    run = Run("step", device, {"quick": options.quick, "budget_s": options.budget, **settings})
    begin = time.perf_counter()
    run.ceilings = ceilings(device, options.quick)
    for number, who in enumerate(options.candidates):
        progress(number, len(options.candidates), who)
        left = options.budget - (time.perf_counter() - begin)
        row = run_alone(who, workload, device, timeout=left, threads=options.threads, **settings)
        run.results.append(checked(row, next((row for row in run.results if row.who == ORIGINAL), None)))
    return finish(run, options, report(run))


if __name__ == "__main__":
    main()
