"""The shared expert joins the experts by our Triton programs: values and gradients; whole models."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import (
    DEVICE,
    DTYPES,
    assert_judged,
    by_device,
    examples,
    laid_out,
    second_derivatives,
    skip_without_gradients,
)
from twinkle import presets
from twinkle.commands.comparison import judge
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.moe import triton_block
from twinkle.kernel.ops.moe.triton_block import join
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import unkernelize

pytest.importorskip("transformers")

BLOCKS = {
    "qwen3_next": "Qwen3NextSparseMoeBlock",
    "qwen3_5_moe": "Qwen3_5MoeSparseMoeBlock",
}
"""Families whose blocks have a shared expert -> their class."""

SIZES = by_device([(1, 1), (7, 33), (40, 64), (3, 1500)], [(1, 1), (1000, 33), (8192, 2048), (33, 5000)])
NAMES = ("routed", "gate", "shared")


def inputs(
    tokens: int, width: int, dtype: torch.dtype, seed: int, layout: str = "contiguous"
) -> dict[str, torch.Tensor]:
    shapes = {"routed": (tokens, width), "gate": (tokens, 1), "shared": (tokens, width)}
    return {name: laid_out(shapes[name], dtype, layout, seed + n, scale=2.0) for n, name in enumerate(NAMES)}


def formula(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    return routed + torch.sigmoid(gate) * shared


@examples
@given(
    sizes=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    layout=st.sampled_from(("contiguous", "two dimensions swapped", "a slice with gaps")),
    gradient_layout=st.sampled_from(("contiguous", "two dimensions swapped", "one number for all")),
)
def test_values_and_gradients_are_within_the_judgement(
    sizes: tuple[int, int], dtype: torch.dtype, seed: int, layout: str, gradient_layout: str
) -> None:
    def made(number: int) -> dict[str, torch.Tensor]:
        return inputs(*sizes, dtype, seed + 10 * number, layout)

    times = 8 if sizes[0] * sizes[1] < 32 else 1
    assert_judged(join, formula, formula, made, times=times, gradient_layout=gradient_layout)


@pytest.mark.parametrize("needed", [("gate",), ("shared",), ("routed", "shared"), NAMES])
def test_only_wanted_gradients_and_those_of_gradients(needed: tuple[str, ...]) -> None:
    given = inputs(5, 8, torch.float32, 3)
    found = second_derivatives(join, given, needed)
    torch.testing.assert_close(found, second_derivatives(formula, given, needed))


def test_what_the_program_cant_take_goes_pytorchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(triton_block, "_programs_for", never)
    made = inputs(5, 8, torch.float32, 3)
    for changed in ({"gate": made["gate"].half()}, {"gate": made["shared"]}, {"shared": made["shared"][:1]}):
        both = {**made, **changed}
        torch.testing.assert_close(join(**both), formula(**both))


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_familys_block(family: str, dtype: torch.dtype) -> None:
    """Verified one by one, and in the model: outputs and the gradient of every parameter."""
    skip_without_gradients(family)
    original = presets.build(family, dtype=dtype).to(DEVICE)
    mapping = {f"{type(original).__module__}.{BLOCKS[family]}.forward": KernelChoice("moe_block", ("triton",))}
    model = kernelize(copy.deepcopy(original), mapping, verify=True, strict=True)
    used = judge(original, model)
    (row,) = report(model).rows
    assert (short(row.target), row.state, row.verified) == (f"{family}.{BLOCKS[family]}.forward", "installed", True)
    assert row.calls > 0 and row.fallbacks == {}
    assert used and max(used.values()) <= 1, {key: value for key, value in used.items() if value > 1}
    unkernelize(model)


def test_a_block_without_a_shared_expert_has_nothing_to_fuse() -> None:
    model = presets.build("qwen3_moe").to(DEVICE)
    target = f"{type(model).__module__}.Qwen3MoeSparseMoeBlock.forward"
    kernelize(model, {target: KernelChoice("moe_block", ("triton",))})
    (row,) = report(model).rows
    assert row.state == "refused" and "without a shared expert" in row.why()
    unkernelize(model)
