"""The cookbook's step on several devices: ``python -m benchmarks.distributed --worlds 1,2,4 --json FILE``.

Each candidate in each layout gets processes of its own, started by torchrun: a mixture of experts with random weights
and LoRA on attention and experts, on this project's text, the experts shared by one process (FSDP2 alone), by two, by
all. A device has the same work in every world. On several hosts, torchrun itself starts one layout:

    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.distributed --who twinkle --ep 16 --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.alone import ROOT, alone
from benchmarks.program import arguments, figure_cells, finish, forget_peak, names_option, peak_memory, progress, start
from benchmarks.step import checked
from benchmarks.trace import kinds_of_work, profiled
from twinkle.bench.clocks import synchronize
from twinkle.bench.results import ORIGINAL, Result, Run, measured, significant
from twinkle.commands.console import first_line
from twinkle.layout import plain, table, width_of_terminal

COOKBOOK = ROOT / "cookbook" / "transformers"

OURS, FUSED = "twinkle", "twinkle+fused_ce"
CANDIDATES: dict[str, dict[str, Any]] = {ORIGINAL: {}, OURS: {}, FUSED: {"enable_liger": True}}
"""Who -> the settings of the cookbook that differ; the original runs with ``TWINKLE_TORCH_BASELINE=1``."""

WARM_UP = 3

FAILED = "failed: "
"""How the line begins that tells why a process failed; torchrun's own output follows it."""

QUICK = {"model": "tiny:qwen3_moe", "layers": None, "batch": 2, "length": 32, "steps": 3}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is trained, and how long: the same for all."""
    asked = {name: getattr(options, name) for name in ("model", "layers", "batch", "length", "steps", "experts")}
    return asked | (QUICK if options.quick else {})


# --- one of the processes ---------------------------------------------------------------------------------------------


def measure(who: str, ep: int, asked: dict[str, Any]) -> tuple[Result, torch.device] | None:
    """The row of a candidate, in one of the processes that torchrun started; in the first only."""
    if who == ORIGINAL:
        os.environ["TWINKLE_TORCH_BASELINE"] = "1"
    sys.path.insert(0, str(COOKBOOK))
    import torch.distributed as dist
    from ep_fsdp2_lora_qwen3_moe import build
    from log import experts_backend
    from models import batch, tokens
    from settings import ExpertSettings
    from training import optimize, processes

    settings = ExpertSettings(
        model=asked["model"], layers=asked["layers"], length=asked["length"], ep_size=ep, experts=asked["experts"]
    )
    settings = dataclasses.replace(settings, **CANDIDATES[who])
    with processes(settings) as place:
        model, optimizer = build(settings, place)
        ids, device = tokens(settings.model, None), place.device
        rows = asked["batch"] * place.world

        def step(number: int) -> torch.Tensor:
            own = batch(ids, number, rows, settings.length, 0).chunk(place.world)[place.rank].to(device)
            return optimize(model, optimizer, [own], settings.max_grad_norm)[0]

        dist.barrier()
        begin = time.perf_counter()
        first = step(0)
        dist.all_reduce(first)
        figures = {"loss": round(first.item() / place.world, 6), "first_step_s": round(time.perf_counter() - begin, 3)}
        for number in range(1, WARM_UP):
            step(number)
        synchronize(device)
        forget_peak(device)
        ms = []
        for number in range(WARM_UP, WARM_UP + asked["steps"]):
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            step(number)
            synchronize(device)
            ms.append((time.perf_counter() - begin) * 1e3)
        fields = measured(ms)
        each = asked["batch"] * settings.length / fields["ms"]["p50"] * 1e3
        figures |= {"tokens_per_s": round(each * place.world, 1), "tokens_per_s_each": round(each, 1)}
        if device.type != "cpu":
            peak = torch.tensor(peak_memory(device)["peak_memory_gb"], device=device)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            figures |= {"peak_memory_gb": round(peak.item(), 3)} | profiled(lambda: step(0), device, _work)
        backend = experts_backend(model)
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        case, shape = _case(asked, place.world, ep or place.world), f"{asked['batch']}x{asked['length']}"
        row = Result(case, who, shape, dtype, **fields, figures=figures, note=f"experts: {backend}")
        return (row, device) if place.rank == 0 else None


def _case(asked: dict[str, Any], world: int, ep: int) -> str:
    model = asked["model"].partition(":")[2] or asked["model"]
    layers = f"-{asked['layers']}layers" if asked["layers"] else ""
    return f"distributed/{model}{layers}/{world} processes/ep {ep}"


def _work(events: Any) -> dict[str, float]:
    kinds = {
        "all_to_all": lambda name: "nccl" in name and ("SendRecv" in name or "AllToAll" in name),
        "sharding": lambda name: "nccl" in name,
        "experts": lambda name: name in _products() or "GroupProblemShape" in name or "grouped" in name,
    }
    return kinds_of_work(events, kinds, ("all_to_all", "sharding"))


@functools.cache
def _products() -> frozenset[str]:
    """Our Triton programs for experts that multiply matrices."""
    from twinkle.kernel.ops.moe import triton_kernels

    programs = {name: getattr(value, "src", "") for name, value in vars(triton_kernels).items()}
    return frozenset(name for name, source in programs.items() if isinstance(source, str) and "tl.dot" in source)


# --- the program ------------------------------------------------------------------------------------------------------


def run_layout(who: str, world: int, ep: int, options: argparse.Namespace, timeout: float) -> Result:
    """A candidate's row, measured in processes of their own; with a note instead of figures when that fails."""
    asked = settings_of(options)
    failed = Result(_case(asked, world, ep), who, f"{asked['batch']}x{asked['length']}", "-")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        answer = Path(folder, "row.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        own = ["-m", "benchmarks.distributed", "--who", who, "--ep", str(ep), "--json", str(answer)]
        same = [
            f"--{name}={value}"
            for name, value in vars(options).items()
            if name in ("model", "layers", "batch", "length", "steps", "experts", "threads") and value is not None
        ]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        note = alone([*launcher, *own, *same, *(["--quick"] if options.quick else [])], threads, timeout, _why)
        if note is not None:
            return dataclasses.replace(failed, note=note)
        (row,) = json.loads(answer.read_text())["results"]
        return Result(**row)


def _why(code: int, said: str) -> str:
    errors = [line.removeprefix(FAILED) for line in said.splitlines() if line.startswith(FAILED)]
    why = errors[0] if errors else "they didn't say why"
    return f"its processes ended with exit code {code}: {why}"


def layouts(world: int, asked: list[int]) -> list[int]:
    """How many processes share the experts: those of ``asked`` that divide the world, 0 being all."""
    sizes = {ep or world for ep in asked}
    return sorted(ep for ep in sizes if ep <= world and world % ep == 0)


COLUMNS = {
    "all_to_all_ms": "all-to-all, ms",
    "sharding_ms": "FSDP, ms",
    "experts_ms": "experts, ms",
    "rest_ms": "rest, ms",
    "exposed_ms": "only communicating, ms",
    "peak_memory_gb": "peak GB",
    "loss": "loss",
}


def report(run: Run) -> str:
    """A line per candidate and layout."""
    lines = []
    for row in run.results:
        if not row.ms:
            continue
        _, _, world, ep = row.case.rsplit("/", 3)
        each = f"{row.figures['tokens_per_s_each']:.0f}"
        lines.append((world, ep, row.who, each, significant(row.ms["p50"]), *figure_cells(row, COLUMNS)))
    shown = plain(table(("", "", "who", "tokens/s each", "ms", *COLUMNS.values()), lines, width_of_terminal()))
    return "\n".join([shown, *(f"{row.case} {row.who}: {row.note}" for row in run.results if row.note)])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: list[str] | None = None) -> Run | None:
    """Runs the program, or under torchrun one of a layout's processes; returns what was measured."""
    parser = arguments("distributed", "Times the cookbook's training step of a mixture of experts on several devices.")
    parser.add_argument("--worlds", type=_numbers, default=[1, 2], metavar="N,...", help="processes (default: 1,2)")
    parser.add_argument(
        "--ep",
        type=_numbers,
        default=[1, 2, 0],
        metavar="N,...",
        help="that share the experts; 0: all (default: 1,2,0)",
    )
    parser.add_argument(
        "--who", type=names_option(CANDIDATES), default=list(CANDIDATES), metavar="NAME,...", help="candidates"
    )
    parser.add_argument("--model", default="shape:qwen3_30b_a3b", help="as the cookbook's")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default: 6)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each process (default: 4)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each (default: 2048)")
    parser.add_argument("--steps", type=int, default=10, help="that are timed (default: 10)")
    parser.add_argument("--experts", default="", help="backends of the experts, e.g. triton; the default mapping's")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="when to stop (default: 540)")
    options = parser.parse_args(argv)
    device = start(options)
    asked = settings_of(options)
    if "RANK" in os.environ:
        try:
            found = measure(options.who[0], options.ep[0], asked)
        except Exception as error:
            print(f"{FAILED}{type(error).__name__}: {first_line(error)}", file=sys.stderr, flush=True)
            raise
        if found is None:
            return None
        run = Run("distributed", found[1], asked, results=[found[0]])
        return finish(run, options, report(run))
    run = Run("distributed", device, {**asked, "quick": options.quick, "budget_s": options.budget})
    todo = [(world, ep, who) for world in options.worlds for ep in layouts(world, options.ep) for who in options.who]
    begin = time.perf_counter()
    for number, (world, ep, who) in enumerate(todo):
        progress(number, len(todo), f"{world} processes, ep {ep}, {who}")
        row = run_layout(who, world, ep, options, options.budget - (time.perf_counter() - begin))
        same = (one for one in run.results if one.who == ORIGINAL and one.case == row.case)
        run.results.append(checked(row, next(same, None)))
    return finish(run, options, report(run))


if __name__ == "__main__":
    main()
