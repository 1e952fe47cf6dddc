"""Our Triton kernels of ``swiglu`` and ``geglu``: numbers, layouts, gradients, and what they leave alone."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.triton_device import (
    DEVICE,
    DTYPES,
    ROWS,
    WIDTHS,
    assert_judged,
    by_device,
    examples,
    gradient_layouts,
    is_dense,
    laid_out,
    launched,  # noqa: F401
    layouts,
    layouts_told_apart,  # noqa: F401
    second_derivatives,
    subsets,
    times_for,
)
from twinkle.kernel.ops.glu.reference import ACTIVATIONS
from twinkle.kernel.ops.glu.triton import fused_glu, glu

SERVED = ("silu", "gelu_tanh", "gelu")


def formula(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return ACTIVATIONS[activation](gate) * up


def fused_formula(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    return formula(*gate_up.chunk(2, dim=-1), activation)


def functions(activation: str, fused: bool) -> tuple[Any, Any, Any]:
    """The kernel, the formula and the formula in fp64 (the same: it computes in what it gets)."""
    kernel, original = (fused_glu, fused_formula) if fused else (glu, formula)
    original = functools.partial(original, activation=activation)
    return functools.partial(kernel, activation=activation), original, original


# --- the judgement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_a_product_is_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, width = data.draw(st.sampled_from(ROWS)), data.draw(st.sampled_from(WIDTHS))
    activation = data.draw(st.sampled_from(SERVED))
    gate_layout, up_layout = data.draw(layouts), data.draw(layouts)
    needed, gradient_layout = data.draw(st.sampled_from(list(subsets(["gate", "up"])))), data.draw(gradient_layouts)

    def inputs(number: int) -> dict[str, torch.Tensor]:
        gate = laid_out((*rows, width), dtype, gate_layout, 10 * number + 1, scale=3.0)
        return {"gate": gate, "up": laid_out((*rows, width), dtype, up_layout, 10 * number + 2)}

    step = assert_judged(
        *functions(activation, fused=False),
        inputs,
        times=times_for(rows, width),
        needed=needed,
        gradient_layout=gradient_layout,
    )
    assert step.outputs[0].is_contiguous()
    assert all(gradient.is_contiguous() for gradient in step.gradients.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_the_product_of_a_fused_projection_is_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, width = data.draw(st.sampled_from(ROWS)), data.draw(st.sampled_from(WIDTHS))
    activation = data.draw(st.sampled_from(SERVED))
    layout, gradient_layout = data.draw(layouts), data.draw(gradient_layouts)
    step = assert_judged(
        *functions(activation, fused=True),
        lambda number: {"gate_up": laid_out((*rows, 2 * width), dtype, layout, 10 * number + 1, scale=3.0)},
        times=times_for(rows, width),
        gradient_layout=gradient_layout,
    )
    assert step.outputs[0].is_contiguous()
    assert step.gradients["gate_up"].is_contiguous()


@pytest.mark.parametrize("fused", (False, True))
def test_accumulated_gradients_have_the_strides_of_the_leaves(fused: bool) -> None:
    for layout in ("contiguous", "two dimensions swapped", "last dimension outermost"):
        names = ("gate_up",) if fused else ("gate", "up")
        leaves = {n: laid_out((3, 4, 6), torch.float32, layout, i).requires_grad_() for i, n in enumerate(names)}
        functions("silu", fused)[0](**leaves).sum().backward()
        for leaf in leaves.values():
            assert is_dense(leaf) and leaf.grad is not None
            assert leaf.grad.stride() == leaf.stride()


def test_a_fused_projection_is_read_in_place(launched: list[Any]) -> None:  # noqa: F811
    """Neither its halves nor the gradients of these are copied."""
    gate_up = laid_out((3, 5, 32), torch.float32, "contiguous", 1).requires_grad_()
    product = fused_glu(gate_up, "silu")
    (gradient,) = torch.autograd.grad(product, gate_up, torch.ones_like(product))
    (gate, up, _), (_, gate_again, up_again, dgate, dup) = (tensors for _, tensors in launched)
    address, half = gate_up.data_ptr(), 16 * gate_up.element_size()
    assert [t.data_ptr() - address for t in (gate, up, gate_again, up_again)] == [0, half, 0, half]
    assert [t.data_ptr() - gradient.data_ptr() for t in (dgate, dup)] == [0, half]


@pytest.mark.parametrize("activation", SERVED)
def test_large_and_missing_values_are_the_formulas(activation: str) -> None:
    values = [0.0, -0.0, 30.0, -30.0, 300.0, -300.0, 1e4, -1e4, float("nan")]
    gate = torch.tensor(values, device=DEVICE)
    up = torch.ones_like(gate)
    results = []
    for function in functions(activation, fused=False)[:2]:
        g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
        y = function(g, u)
        results.append([y.detach(), *torch.autograd.grad(y, (g, u), torch.ones_like(y))])
    torch.testing.assert_close(*results, equal_nan=True)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", list(subsets(["gate", "up"])), ids="-".join)
@pytest.mark.parametrize("activation", SERVED)
def test_second_derivatives_are_the_formulas(activation: str, needed: Collection[str]) -> None:
    inputs = {name: laid_out((3, 16), torch.float32, "contiguous", seed) for seed, name in enumerate(("gate", "up"))}
    ours, theirs = (second_derivatives(f, inputs, needed) for f in functions(activation, fused=False)[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", SERVED)
def test_second_derivatives_of_a_fused_projection_are_the_formulas(activation: str) -> None:
    inputs = {"gate_up": laid_out((3, 16), torch.float32, "contiguous", 1)}
    ours, theirs = (second_derivatives(f, inputs, {"gate_up"}) for f in functions(activation, fused=True)[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_gradient_to_be_differentiated_again_holds_its_own_part_only() -> None:
    """``up`` here is computed from the gate, whose gradient must not hold up's part twice."""
    results = []
    for function in functions("silu", fused=False)[:2]:
        gate = laid_out((3, 16), torch.float32, "contiguous", 1).requires_grad_()
        (gradient,) = torch.autograd.grad(function(gate, 2 * gate).square().sum(), gate, create_graph=True)
        results.append([gradient.detach(), *torch.autograd.grad(gradient.square().sum(), gate)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_the_gate_may_be_its_own_factor() -> None:
    gate = laid_out((3, 16), torch.float32, "contiguous", 1).requires_grad_()
    (ours,) = torch.autograd.grad(glu(gate, gate, "silu").sum(), gate)
    (theirs,) = torch.autograd.grad(formula(gate, gate, "silu").sum(), gate)
    torch.testing.assert_close(ours, theirs)


# --- what is refused before a launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    {
        "shapes that broadcast": (torch.ones(3, 4), torch.ones(4), "differ in shape or dtype"),
        "dtypes": (torch.ones(3, 4), torch.ones(3, 4).bfloat16(), "differ in shape or dtype"),
        "fp64": (torch.ones(3, 4).double(), torch.ones(3, 4).double(), "fp32, bf16, fp16"),
        "devices": (torch.ones(3, 4), torch.ones(3, 4, device="meta"), "different devices"),
        "no elements": (torch.ones(0, 4), torch.ones(0, 4), "an empty tensor"),
    }.values(),
)
def test_bad_input_is_an_error_before_a_launch(gate: torch.Tensor, up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glu(gate.to(DEVICE), up if up.is_meta else up.to(DEVICE), "silu")


@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (3,), ()], ids=str)
def test_a_fused_projection_in_unequal_parts_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="equal parts"):
        fused_glu(torch.ones(shape, device=DEVICE), "silu")


def test_many_blocks() -> None:
    """More elements than one program takes, with a last block that is not full, in one row and in several."""
    width = by_device(2050, 1_000_003)
    for layout in ("contiguous", "a slice with gaps"):
        assert_judged(
            *functions("gelu_tanh", fused=False),
            lambda _, layout=layout: {
                "gate": laid_out((3, width), torch.bfloat16, layout, 1),
                "up": laid_out((3, width), torch.bfloat16, "contiguous", 2),
            },
        )
