"""What only looks like an op is told apart, whatever the difference hangs on; by running it, not by its name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

from tests.support import lookalikes as like
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.report import Row, report
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("loopback")


def rows_for(op: str, *modules: nn.Module, target: Any = None) -> list[Row]:
    model = nn.ModuleList(modules)
    kernelize(model, {target or type(modules[0]): KernelChoice(op, ("loopback",))})
    rows = report(model).rows
    unkernelize(model)
    return rows


@pytest.mark.parametrize("op, make", [("rms_norm", like.Norm), ("swiglu", like.MLP), ("moe_experts", like.Experts)])
@pytest.mark.parametrize("training", [True, False])
def test_what_the_others_are_like_is_recognised(op: str, make: Any, training: bool) -> None:
    assert [row.state for row in rows_for(op, make().train(training))] == ["installed"]


def test_the_rotary_that_the_others_are_like_is_recognised() -> None:
    assert rows_for("rotary", like.Attention(), target=f"{like.__name__}.rope")[0].state == "installed"


LOOKALIKES = [
    ("rms_norm", lambda: like.WithGain(())),
    ("rms_norm", lambda: like.WithGain((1, 1))),
    ("rms_norm", lambda: like.WithGain((1,))),
    ("rms_norm", lambda: like.WithGain((), trained=False)),
    ("rms_norm", lambda: like.OverDims(1)),
    ("rms_norm", lambda: like.OverDims("all but the first")),
    ("rms_norm", like.OverGroups),
    ("rms_norm", like.OtherwiseInTraining),
    ("rms_norm", like.OtherwiseInEvaluation),
    ("rms_norm", like.OtherwiseForHeads),
    ("rms_norm", like.ClampedNorm),
    ("gated_rms_norm", like.GatedNorm),
    ("swiglu", like.MLPWithGain),
    ("swiglu", lambda: like.MLPWithSettings(2.0)),
    ("swiglu", like.ClampedMLP),
    ("swiglu", like.MLPOtherwiseInEvaluation),
    ("swiglu", like.MLPOtherwiseForBatches),
    ("swiglu", like.MLPWithBoundedActivation),
    ("moe_experts", like.ClampedExperts),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("op", "make"), LOOKALIKES)
def test_a_lookalike_is_refused(op: str, make: Any, training: bool) -> None:
    (row,) = rows_for(op, make().train(training))
    assert row.state == "refused" and [reason.code for reason in row.reasons] == ["not-this-op"], row.why()


@pytest.mark.parametrize("name", ["rope_with_positions", "rope_of_one_layout", "rope_for_grouped_heads"])
def test_a_lookalike_of_the_rotary_is_refused(name: str) -> None:
    (row,) = rows_for("rotary", like.Attention(), target=f"{like.__name__}.{name}")
    assert row.state == "refused" and "none of the known rotary dialects" in row.why()


@pytest.mark.parametrize("modules", [(like.MLP(), like.MLP(F.gelu)), [like.MLPWithSettings(s) for s in (1.0, 2.0)]])
def test_instances_that_differ_in_private_attributes_are_told_apart(modules: Any) -> None:
    for order in (modules, modules[::-1]):
        assert {row.state: row.instances for row in rows_for("swiglu", *order)} == {"installed": 1, "refused": 1}
