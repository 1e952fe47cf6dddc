"""Which backend is the fastest for my model, on my machine? Measured in turns, then chosen.

python examples/choose_by_measurement.py

"twinkle-kernel bench MODEL" does this for every entry, with the noise and the memory, and prints a mapping to paste.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import kernelized

NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
ROUNDS = 5


def candidates(model: Any) -> dict[str, dict[Any, Any]]:
    """Name -> mapping: nothing, and each backend of the norm that can be used here."""
    found: dict[str, dict[Any, Any]] = {"original": {}}
    for backend in ("triton", "liger", "torch"):
        mapping = {NORM: KernelChoice("rms_norm", (backend,))}
        if plan(model, mapping).rows[0].state == "installed":
            found[backend] = mapping
    return found


def seconds(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """One training step."""
    start = time.perf_counter()
    model(**batch).loss.backward()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = presets.build("qwen3").to(device).train()
    rows = torch.randint(3, 250, (16, 256), device=device)
    batch = {"input_ids": rows, "labels": rows}
    times: dict[str, list[float]] = {}
    mappings = candidates(model)
    for round_ in range(ROUNDS + 1):
        for name, mapping in mappings.items():  # in turns, so that a drift of the machine hits all alike
            with kernelized(model, mapping):
                took = seconds(model, batch)
            if round_:  # the first one compiles
                times.setdefault(name, []).append(took)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        print(f"{name}: {median * 1e3:.2f} ms")
    best = min(medians, key=lambda name: medians[name])
    print(f"fastest: {best}")
    without_norm = {key: choice for key, choice in DEFAULT_KERNEL_CONFIG.items() if key != NORM}
    kernelize(model, {**without_norm, **mappings[best]})
    print(report(model).table())


if __name__ == "__main__":
    main()
