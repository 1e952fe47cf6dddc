"""One of the demo's two processes: it does what it is told on stdin and answers on stdout, one JSON object a line."""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from twinkle.commands.console import first_line
from twinkle.commands.demo.memory import PeakMemory
from twinkle.commands.demo.training import (
    BATCH,
    LENGTH,
    Order,
    Training,
    batches,
    exact_results,
    forward,
    new_model,
    results,
)
from twinkle.commands.options import mapping_for, parse_device

OPT_IN = ("inductor", "torch")
"""What serves where the default mapping installs nothing: the first whose kernels run here."""

ORDERS = 3
"""Summation orders of the original, the usual one included, that show what rounding alone does."""


class Original:
    """The training of the original model. Every public method is a request."""

    def __init__(self, text: str, device: str) -> None:
        self.text = text.encode()
        self.device, _ = parse_device(device, present=True)  # imports the vendor's plug-in where it needs one
        self.memory = PeakMemory(device)

    def prepare(self) -> dict[str, Any]:
        """Builds the model and calls it once, forward and backward."""
        self.model = new_model(self.device)
        seconds = self._first_call()
        self._start(self.model)
        accelerator = None if self.memory.on_cpu else torch.get_device_module(self.device).get_device_name()
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "tokens": BATCH * LENGTH,
            "first_call": seconds,
            "device_name": accelerator or f"{torch.get_num_threads()} threads",
            "torch": torch.__version__,
        }

    def _first_call(self) -> float:
        start = time.perf_counter()
        results(self.model, next(batches(self.text, self.device)))
        return time.perf_counter() - start

    def _start(self, model: Any, order: Order | None = None) -> None:
        self.training = Training(model, self.text, self.device, order)
        self.memory.reset()

    def step(self) -> dict[str, float]:
        """One step of training."""
        loss, seconds = self.training.step()
        return {"loss": loss, "seconds": seconds}

    def peak_memory(self) -> dict[str, Any]:
        """Of the steps since the training started."""
        return self.memory.read()

    def start_order(self, number: int) -> None:
        """Starts the training again, in another summation order."""
        order = Order(number)
        self._start(order.of_model(new_model(self.device)), order)


class Kernelized(Original):
    """The training of the kernelized model."""

    def prepare(self, backends: list[str]) -> dict[str, Any]:  # type: ignore[override]
        """Builds the model, kernelizes it and calls it once.

        Args:
            backends: the chain that replaces every entry's own; empty for the default mapping and, where that installs
                nothing, the first of :data:`OPT_IN` that works.
        """
        from twinkle.kernel.report import plan

        self.model = new_model(self.device)
        self.classes = {name: type(module) for name, module in self.model.named_modules()}
        planned = plan(self.model)
        concerned = [row for row in planned.rows if row.state not in ("unused", "missing")]
        self.functions = {row.target: _resolve(row.target) for row in concerned if row.scope == "process"}
        chosen = self._choose([row.target for row in concerned], tuple(backends))
        self.twin = copy.deepcopy(self.model)  # stays kernelized; judged after the training, so not to disturb it
        self._start(self.model)
        return {"plan": planned.to_dict(), **chosen}

    def _choose(self, targets: list[str], backends: tuple[str, ...]) -> dict[str, Any]:
        """Kernelizes by the first mapping that installs something whose first call works."""
        default = mapping_for(())
        chains = [backends] if backends else [(), *((backend,) for backend in OPT_IN)]
        refused = []
        for chain in chains:
            mapping = {target: replace(default[target], backends=chain) for target in targets} if chain else default
            try:
                seconds = self._kernelize(mapping)
            except Exception as error:  # e.g. a compiler that is there but doesn't work
                self._undo()
                refused.append({"backends": chain, "reason": f"{type(error).__name__}: {first_line(error)}"})
                continue
            if seconds is not None:
                return {"backends": chain, "first_call": seconds, "refused": refused}
            refused.append({"backends": chain, "reason": "it installs nothing on this machine"})
        return {"backends": (), "first_call": self._first_call(), "refused": refused}

    def _kernelize(self, mapping: Mapping[Any, Any]) -> float | None:
        """The seconds of the first call; None when nothing was installed."""
        from twinkle.kernel import kernelize
        from twinkle.kernel.report import report

        kernelize(self.model, mapping)
        if not any(row.state == "installed" for row in report(self.model).rows):
            self._undo()
            return None
        return self._first_call()

    def _undo(self) -> Any:
        from twinkle.kernel.undo import unkernelize

        return unkernelize(self.model)

    def report(self) -> dict[str, Any]:
        """The report after the training, with the calls that the kernels served."""
        from twinkle.kernel.report import report

        return report(self.model).to_dict()

    def judge_first_step(self) -> list[tuple[str, float]]:
        """Loss, logits and gradients of the first batch: the share of the allowed error that each uses.

        The original's own error in a single summation order is a matter of luck: measured by it, the original in
        another order is off now and then. So it is taken from :data:`ORDERS` orders; the one that allows most counts.
        """
        from twinkle.kernel.journal import process_originals
        from twinkle.kernel.undo import unkernelize
        from twinkle.kernel.verify import allowed_error_used

        ids = next(batches(self.text, self.device))
        ours = results(self.twin, ids)
        unkernelize(self.twin)  # a copy claims process-wide functions for itself
        del self.twin
        with process_originals():
            reference = exact_results(ids)
            originals = []
            for order in map(Order, range(ORDERS)):
                found = results(order.of_model(new_model(self.device)), order.of_batch(ids))
                originals.append({name: order.back(name, tensor) for name, tensor in found.items()})
        return [
            (name, min(allowed_error_used(tensor, original[name], reference[name]) for original in originals))
            for name, tensor in ours.items()
        ]

    def undo(self) -> dict[str, Any]:
        """Takes the kernels out and compares with a fresh original that gets the same weights."""
        ids = next(batches(self.text, self.device))
        undone = self._undo()
        fresh = new_model(self.device)
        fresh.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            (_, expected), (_, got) = forward(fresh, ids), forward(self.model, ids)
        return {
            "modules": undone.modules,
            "functions": undone.patches,
            "not_undone": [str(reason) for reason in undone.not_undone],
            "classes_restored": all(type(m) is self.classes[name] for name, m in self.model.named_modules()),
            "functions_restored": all(_resolve(target) is f for target, f in self.functions.items()),
            "bit_identical": torch.equal(expected, got),
            "difference": (expected - got).abs().max().item(),
        }


def _resolve(target: str) -> Any:
    """The function that a process-wide target names; None for a logical name."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name) if module else None


ROLES = {"original": Original, "kernelized": Kernelized}


def main() -> None:
    """Serves requests ``{"call": …, "arguments": {…}}`` until stdin ends.

    The first makes the worker; each answer is ``{"result": …}`` or ``{"error": …, "trace": …}``.
    """
    # What libraries print must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker, result = ROLES[request["call"]](**request["arguments"]), None
            else:
                result = getattr(worker, request["call"])(**request["arguments"])
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {first_line(error)}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
