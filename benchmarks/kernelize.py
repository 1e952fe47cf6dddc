"""What kernelizing costs: ``python -m benchmarks.kernelize --json FILE``.

- ``import``: ``import twinkle.kernel`` in a fresh process.
- ``kernelize/…``: the two parts of ``kernelize``, their sum, and ``unkernelize``, for a 48-layer Qwen3-MoE (the 30B-A3B
  configuration) on the meta device. ``default`` is the default config for this machine's device; ``loopback`` installs
  every op's reference, and so changes every module of the model that any entry names.
- ``call``: a call that does nothing, bare and with a kernel installed: what counting and routing add.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.program import arguments, finish, start
from benchmarks.workloads import QWEN3_30B_A3B
from twinkle.bench.clocks import CpuClock, interleaved
from twinkle.bench.results import Result, Run, measured, percentile_texts, significant
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
from twinkle.kernel.apply import apply_plan
from twinkle.kernel.plan import make_plan
from twinkle.kernel.testing import register_test_backends, unregister_test_backends, with_backends
from twinkle.kernel.undo import unkernelize
from twinkle.layout import plain, table, width_of_terminal


def meta_model(layers: int) -> nn.Module:
    """A Qwen3-MoE without storage."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**QWEN3_30B_A3B, "num_hidden_layers": layers})).eval()


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    start = time.perf_counter()
    result = function()
    return (time.perf_counter() - start) * 1e3, result


def kernelize_times(model: nn.Module, mapping: Any, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each part, one per round; the first round's imports are left out."""
    times: dict[str, list[float]] = {"plan": [], "apply": [], "kernelize": [], "undo": []}
    for number in range(rounds + 1):
        plan_ms, plan = timed(lambda: make_plan(model, mapping, device=device))
        apply_ms, _ = timed(lambda plan=plan: apply_plan(plan))  # type: ignore[misc]
        undo_ms, _ = timed(lambda: unkernelize(model))
        if number:
            for part, ms in zip(times, (plan_ms, apply_ms, plan_ms + apply_ms, undo_ms), strict=True):
                times[part].append(ms)
    return times


def import_times(rounds: int) -> list[float]:
    """Milliseconds of ``import twinkle.kernel`` in fresh processes."""
    program = "import time; t = time.perf_counter(); import twinkle.kernel; print((time.perf_counter() - t) * 1e3)"
    return [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(rounds)]


class Nothing(nn.Module):
    """A module whose call costs as little as a call can."""

    def forward(self, x: Any) -> Any:
        return x


def nothing(x: Any) -> Any:
    """The same as a function."""
    return x


def call_times(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a call that does nothing, bare and with a kernel installed that does nothing either."""

    def kernel(self: Any, x: Any) -> Any:
        return x

    def checked(self: Any, x: Any) -> Any:
        return x

    checked.accepts_call = lambda self, x: None  # type: ignore[attr-defined]
    method, function = f"{__name__}.Nothing.forward", f"{__name__}.nothing"
    models = {
        "method": kernelize(Nothing(), {method: kernel}),
        "method, each call checked": kernelize(Nothing(), {method: checked}),
    }
    routed = kernelize(Nothing(), {function: lambda x: x})
    calls: dict[str, Callable[..., Any]] = {"bare": partial(Nothing.forward, Nothing())}
    calls |= {who: partial(type(model).forward, model) for who, model in models.items()}
    calls["function"] = nothing  # the router, by now

    def repeated(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(1000):
                call(1)

        return run

    samples = interleaved({who: repeated(c) for who, c in calls.items()}, CpuClock(), rounds=rounds, seconds=10)
    for model in (*models.values(), routed):
        unkernelize(model)
    return {who: [ms / 1000 for ms in per_thousand] for who, per_thousand in samples.items()}


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    parser = arguments("kernelize", "Times import, plan, apply, undo and a counted call.")
    parser.add_argument("--layers", type=int, default=48, help="decoder layers of the model (default: 48)")
    options = parser.parse_args(argv)
    device = start(options)
    layers, rounds = (2, 2) if options.quick else (options.layers, 15)
    run = Run("kernelize", device, {"quick": options.quick, "layers": layers})

    def add(case: str, who: str, samples: list[float], shape: str = "-") -> None:
        run.results.append(Result(case, who, shape, "-", **measured(samples)))

    add("import", "twinkle.kernel", import_times(rounds))
    model, shape = meta_model(layers), f"{layers} layers"
    register_test_backends()
    try:
        # All layers of this model are sparse: it has no dense MLP.
        own = {k: c for k, c in DEFAULT_KERNEL_CONFIG.items() if ".qwen3_moe." in k and "Qwen3MoeMLP" not in k}
        for who, mapping in (("default", None), ("loopback", with_backends(own, "loopback"))):
            for part, samples in kernelize_times(model, mapping, device, rounds).items():
                add(f"kernelize/{part}", who, samples, shape)
    finally:
        unregister_test_backends()
    for who, samples in call_times(rounds).items():
        add("call", who, samples)
    return finish(run, options, report(run))


def report(run: Run) -> str:
    """One line per row; calls in microseconds, and what they add to the bare call."""
    bare = next(r.ms["p50"] for r in run.results if r.who == "bare" and r.ms)
    lines = []
    for r in run.results:
        assert r.ms is not None
        unit, factor = ("us", 1e3) if r.case == "call" else ("ms", 1)
        p20, p50, p80 = percentile_texts(r.ms, factor)
        added = f" (+{significant((r.ms['p50'] - bare) * 1e3)})" if r.case == "call" and r.who != "bare" else ""
        lines.append((r.case, r.who, r.shape, f"{p50} {unit}{added}", f"{p20} .. {p80}"))
    return plain(table(("case", "who", "shape", "p50", "p20 .. p80"), lines, width_of_terminal()))


if __name__ == "__main__":
    main()
