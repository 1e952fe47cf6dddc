"""Kernels for as long as a training of transformers' ``Trainer`` lasts, and what they did in its log.

The trainers of TRL are such trainers. Importing this module imports transformers.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from twinkle.kernel.core import kernelize
from twinkle.kernel.journal import Journal, journals_of
from twinkle.kernel.report import Report, report
from twinkle.kernel.undo import unkernelize

# The trainer's own, so that its log_level says whether this is shown.
trainers_log = logging.getLogger("transformers.trainer")
logger = logging.getLogger("twinkle.kernel")

ENTRY = "twinkle_kernels"
"""The key of what we say in ``trainer.state.log_history``."""

_takers: weakref.WeakKeyDictionary[Journal, object] = weakref.WeakKeyDictionary()
"""Whose the kernels of a model are, where a callback put them in: several trainers may be made for one model, and a
training that raised leaves them there."""


class TwinkleKernelCallback(TrainerCallback):  # type: ignore[misc]
    """Calls ``kernelize`` when a trainer has its model, and ``unkernelize`` when the training is over.

    In the trainer's log: the key ``"twinkle_kernels"``, in an entry at the beginning of a training and in the last one
    of it, tells what serves which part of the model, how often, and what was left as it was, why; every entry with a
    loss has ``kernel_calls`` and ``kernel_fallbacks``, the calls until then. All of it is of this process.

    A model that the caller has kernelized before stays so, to the end and beyond. Where the training raises, the
    trainer doesn't say that it is over, nor where it only evaluates: ``unkernelize(model)``, or the end of a later
    training with such a callback.

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
        self._sign = object()  # ours among the takers; one that doesn't keep this alive

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the model is wrapped, sharded or compiled."""
        if args.use_liger_kernel:
            text = (
                "use_liger_kernel=True: Liger patches the model when training begins, and what it patched is left to "
                "it; leave that argument out to have these kernels"
            )
            logger.warning(text)
        else:
            self._give_back()  # one callback may serve several trainers, one after the other
            self._take(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Once more for a second training, for a model made since by ``model_init``, after Liger, and after another
        trainer of the same model."""
        model = kwargs["model"]
        if self._model is not None and any(module is self._model for module in model.modules()):
            self._take(self._model)
        else:
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
        """Sees to it that the model has our kernels, or the caller's."""
        if _taker(model) not in (None, self._sign):  # another callback's, with a mapping of its own perhaps
            unkernelize(model)
        if not report(model).rows:
            kernelize(model, self._mapping, strict=self._strict, verify=self._verify)
            _takers.update(dict.fromkeys(journals_of(model), self._sign))
        elif self._mapping is not None and model is not self._model:
            logger.warning("the model is kernelized already, and stays so: the callback's mapping is not used")
        self._model = model
        self.report = report(model)

    def _give_back(self) -> None:
        if self._model is not None and _taker(self._model) is self._sign:
            unkernelize(self._model)
        self._model = None

    def _tell(self, state: TrainerState) -> None:
        if self.report is None:
            return
        if state.log_history and "train_runtime" in state.log_history[-1]:  # many look for it in the last entry
            state.log_history[-1][ENTRY] = summary(self.report)
        else:
            state.log_history.append({ENTRY: summary(self.report), "step": state.global_step})
        if state.is_world_process_zero:
            trainers_log.info("%s\n%s", ENTRY, self.report.table())


def _taker(model: nn.Module) -> object | None:
    """The callback whose a model's kernels are; None when they are the caller's, or there are none."""
    return next((_takers[journal] for journal in journals_of(model) if journal in _takers), None)


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
