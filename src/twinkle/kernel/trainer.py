"""Kernels for as long as a training of transformers' ``Trainer`` lasts, and what they did in its log.

The trainers of TRL are such trainers. Importing this module imports transformers.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from twinkle.kernel.core import kernelize
from twinkle.kernel.report import Report, report
from twinkle.kernel.undo import unkernelize

# The trainer's own, so that its log_level says whether this is shown.
trainers_log = logging.getLogger("transformers.trainer")
logger = logging.getLogger("twinkle.kernel")

ENTRY = "twinkle_kernels"
"""The key of our entries in ``trainer.state.log_history``."""


class TwinkleKernelCallback(TrainerCallback):  # type: ignore[misc]
    """Calls ``kernelize`` when a trainer has its model, and ``unkernelize`` when the training is over.

    In the trainer's log: at the beginning and at the end of a training, an entry with the key ``"twinkle_kernels"``
    tells what serves which part of the model, how often, and what was left as it was, why; every entry with a loss has
    ``kernel_calls`` and ``kernel_fallbacks``, the calls until then. All of it is of this process.

    A model that the caller has kernelized before stays so, to the end and beyond. Where the training raises, the
    trainer doesn't say that it is over: ``unkernelize(model)``.

    Args:
        mapping, strict, verify: as for :func:`~twinkle.kernel.kernelize`.

    Attributes:
        report: what became of the model; live, so that its counts grow. None before there is one.
    """

    def __init__(self, mapping: Any = None, *, strict: bool = False, verify: bool = False) -> None:
        self.report: Report | None = None
        self._mapping = mapping
        self._strict = strict
        self._verify = verify
        self._model: nn.Module | None = None
        self._is_ours = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the model is wrapped, sharded or compiled."""
        if args.use_liger_kernel:
            text = (
                "use_liger_kernel=True: Liger patches the model when training begins, and what it patched is left to "
                "it; leave that argument out to have these kernels"
            )
            logger.warning(text)
        else:
            self._take(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Once more for a second training, for a model made since by ``model_init``, and after Liger."""
        model = kwargs["model"]
        if self._model is None or all(module is not self._model for module in model.modules()):
            self._give_back()
            self._take(model)
        self._tell(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The numbers of calls, beside the loss."""
        if self.report is None or logs is None or "loss" not in logs:
            return
        rows = self.report.rows
        calls = sum(row.calls for row in rows)
        numbers = {"kernel_calls": calls, "kernel_fallbacks": sum(sum(row.fallbacks.values()) for row in rows)}
        logs |= numbers
        if state.log_history and "loss" in state.log_history[-1]:  # the trainer has put a copy there before it called
            state.log_history[-1] |= numbers

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tells what was done, and takes it back."""
        if self._model is not None:
            self.report = report(self._model)
        self._tell(state)
        self._give_back()

    def _take(self, model: nn.Module) -> None:
        self._model = model
        self._is_ours = not report(model).rows
        if self._is_ours:
            kernelize(model, self._mapping, strict=self._strict, verify=self._verify)
        elif self._mapping is not None:
            logger.warning("the model is kernelized already, and stays so: the callback's mapping is not used")
        self.report = report(model)

    def _give_back(self) -> None:
        if self._model is not None and self._is_ours:
            unkernelize(self._model)
        self._model = None

    def _tell(self, state: TrainerState) -> None:
        if self.report is None:
            return
        state.log_history.append({ENTRY: summary(self.report), "step": state.global_step})
        if state.is_world_process_zero:
            trainers_log.info("%s\n%s", ENTRY, self.report.table())


def summary(found: Report) -> dict[str, Any]:
    """A report in short, as plain data: what is installed, with its numbers; and why the rest isn't."""
    return {
        "installed": [
            {
                "target": row.target,
                "backend": row.backend,
                "sites": row.instances,
                "calls": row.calls,
                "compiled": row.counts.compiled,
                "fallbacks": row.fallbacks,
                "errors": row.errors,
            }
            for row in found.rows
            if row.state == "installed"
        ],
        "left": {row.target: row.why() for row in found.rows if row.state in ("kept", "refused", "failed")},
    }
