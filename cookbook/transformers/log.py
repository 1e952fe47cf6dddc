"""What a training says: JSON lines for programs, a bar or lines for people."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from settings import Place, Settings, baseline

from twinkle.moe.parts import find_experts, parts


class Log:
    """JSON lines in a file, and a bar or lines for people; of the first process only."""

    def __init__(self, settings: Settings, place: Place) -> None:
        self.first = place.rank == 0
        self.warnings = 0
        if not self.first:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        folder = Path(settings.output)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "log.jsonl").open("a", encoding="utf-8")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=settings.steps)

    def __enter__(self) -> Log:
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._count  # type: ignore[method-assign]
        logging.getLogger("twinkle").addHandler(handler)
        if self.first:
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.first:
            self.bar.stop()
            self.file.close()

    def _count(self, record: logging.LogRecord) -> None:
        self.warnings += 1

    def write(self, event: str, **fields: Any) -> None:
        """A line of the file."""
        if self.first:
            self.file.write(json.dumps({"event": event, **fields}) + "\n")
            self.file.flush()

    def step(self, **fields: Any) -> None:
        """A line of the file, and for people."""
        self.write("step", **fields)
        if self.first:
            said = f"step {fields['step']}  loss {fields['loss']:.4f}  {fields['tokens_per_second']:.0f} tokens/s"
            self.bar.update(self.task, completed=fields["step"], description=said)
            if self.bar.disable:
                print(said, flush=True)


def facts(settings: Settings, place: Place, model: Any) -> dict[str, Any]:
    """The first line of the log: numbers of processes and parameters, of the whole model, and who computes what."""
    ep = getattr(settings, "ep_size", 1) or place.world
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    shared = parts(model)
    whole = {name: size * (ep if name in shared else 1) for name, size in sizes.items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        "model": settings.model,
        "world_size": place.world,
        "ep_size": ep,
        "fsdp_size": place.world // ep,
        "parameters": sum(whole.values()),
        "trained_parameters": sum(whole[name] for name in trained),
        "lora_parameters": sum(size for name, size in whole.items() if "lora_" in name),
        "experts_backend": experts_backend(model),
        "kernels": _kernels(model),
        "baseline": baseline(),
        "device": place.device.type,
        "torch": torch.__version__,
        "settings": vars(settings),
    }


def _kernels(model: Any) -> dict[str, int]:
    """What is installed, and on how many instances."""
    if baseline():
        return {}
    from twinkle.kernel.report import report

    found: dict[str, int] = {}
    for row in report(model).rows:
        if row.state == "installed":
            found[f"{row.op} {row.backend}"] = found.get(f"{row.op} {row.backend}", 0) + (row.instances or 0)
    return found


def memory(place: Place) -> dict[str, float]:
    """The most that PyTorch has held on this process's device so far; nothing on a CPU."""
    if place.device.type == "cpu":
        return {}
    return {"peak_memory_gb": round(torch.get_device_module(place.device).max_memory_allocated() / 1e9, 2)}


def experts_backend(model: Any) -> str | None:
    """Who computes the experts: a backend of ours, or transformers by its own; None without experts."""
    from twinkle.kernel.report import report

    if not find_experts(model):
        return None
    if not baseline():
        served = {row.backend for row in report(model).rows if row.op == "moe_experts" and row.state == "installed"}
        if served:
            return ", ".join(sorted(map(str, served)))
    config = next(module.config for module in model.modules() if hasattr(module, "config"))
    return f"transformers ({config._experts_implementation})"
