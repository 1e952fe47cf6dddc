"""Our Triton kernels of ``rms_norm`` and ``gated_rms_norm``: numbers, layouts, gradients, and what they leave alone."""

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
    LAYOUTS,
    NO_GPU,
    ON_GPU,
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
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.rms_norm.gated_reference import gated_rms_norm
from twinkle.kernel.ops.rms_norm.reference import rms_norm as formula
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.kernel.ops.triton_support import has_rows

KINDS: list[tuple[float, str]] = [(0.0, "before"), (0.0, "after"), (1.0, "after"), (0.0, "factor")]


def norm(kind: tuple[float, str], eps: float) -> tuple[Any, Any, Any]:
    """The kernel, the formula and the formula in fp64, of ``(x, weight)``."""
    offset, cast = kind
    exact = functools.partial(formula, eps=eps, offset=offset, cast=cast, compute_dtype=torch.float64)
    kernel = functools.partial(rms_norm, gate=None, eps=eps, offset=offset, cast=cast)
    return kernel, functools.partial(formula, eps=eps, offset=offset, cast=cast), exact


def gated(eps: float) -> tuple[Any, Any, Any]:
    """The same with a gate, of ``(x, gate, weight)``."""
    exact = functools.partial(gated_rms_norm, eps=eps, compute_dtype=torch.float64)
    return (
        functools.partial(rms_norm, eps=eps, offset=0.0, cast="before"),
        functools.partial(gated_rms_norm, eps=eps),
        exact,
    )


def eps_for(width: int) -> float:
    """Narrow rows get a large one: a row of one element is normalised to 1 whatever it is, its gradient is rounding."""
    return 0.5 if width < 8 else 1e-5


def weight_of(width: int, dtype: torch.dtype | None, seed: int = 3) -> torch.Tensor | None:
    return None if dtype is None else laid_out((width,), dtype, "contiguous", seed)


def assert_refused(kernel: Any, inputs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more than three dimensions"):
        kernel(**inputs)


# --- the judgement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_a_norm_is_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, width = data.draw(st.sampled_from(ROWS)), data.draw(st.sampled_from(WIDTHS))
    kind = data.draw(st.sampled_from(KINDS))
    layout, gradient_layout = data.draw(layouts), data.draw(gradient_layouts)
    # The only norm that casts the factor has no weight.
    weight_dtype = None if kind[1] == "factor" else data.draw(st.sampled_from([*DTYPES, None]))
    needed = data.draw(st.sampled_from(list(subsets(["x", "weight"] if weight_dtype else ["x"]))))

    def inputs(number: int) -> dict[str, torch.Tensor | None]:
        x = laid_out((*rows, width), dtype, layout, 10 * number + 1)
        return {"x": x, "weight": weight_of(width, weight_dtype, 10 * number + 2)}

    functions, x = norm(kind, eps_for(width)), inputs(0)["x"]
    assert x is not None
    if not has_rows(x):
        return assert_refused(functions[0], inputs(0))
    times = times_for(rows, width)
    step = assert_judged(*functions, inputs, times=times, needed=needed, gradient_layout=gradient_layout)
    if is_dense(x):
        assert step.outputs[0].stride() == x.stride()
    assert all(step.gradients[name].stride() == leaf.stride() for name, leaf in step.leaves.items() if is_dense(leaf))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_a_gated_norm_is_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, width = data.draw(st.sampled_from(ROWS)), data.draw(st.sampled_from(WIDTHS))
    gradient_layout = data.draw(gradient_layouts)
    gate_dtype, weight_dtype = (data.draw(st.sampled_from([dtype, torch.float32])) for _ in range(2))
    x_layout, gate_layout = data.draw(layouts), data.draw(layouts)
    needed = data.draw(st.sampled_from(list(subsets(["x", "gate", "weight"]))))

    def inputs(number: int) -> dict[str, torch.Tensor | None]:
        return {
            "x": laid_out((*rows, width), dtype, x_layout, 10 * number + 1),
            "gate": laid_out((*rows, width), gate_dtype, gate_layout, 10 * number + 2),
            "weight": weight_of(width, weight_dtype, 10 * number + 3),
        }

    functions, first = gated(eps_for(width)), inputs(0)
    if not all(t is None or has_rows(t) for t in first.values()):
        return assert_refused(functions[0], first)
    times = times_for(rows, width)
    step = assert_judged(*functions, inputs, times=times, needed=needed, gradient_layout=gradient_layout)
    assert step.outputs[0].dtype == dtype
    assert all(step.gradients[name].stride() == leaf.stride() for name, leaf in step.leaves.items() if is_dense(leaf))


WIDE = [
    (torch.float32, 2, 16385, "contiguous"),
    (torch.bfloat16, 2, 16385, "last dimension outermost"),
    (torch.bfloat16, 3, 32769, "an odd storage offset"),
    *by_device(
        [],
        [
            (torch.bfloat16, 700, 20000, "contiguous"),
            (torch.float32, 64, 32768, "a slice with gaps"),
            (torch.bfloat16, 129, 70000, "last dimension outermost"),
        ],
    ),
]


@pytest.mark.parametrize(("dtype", "rows", "width", "layout"), WIDE)
def test_rows_that_do_not_fit_in_registers(dtype: torch.dtype, rows: int, width: int, layout: str) -> None:
    x = laid_out((rows, width), dtype, layout, 1)
    assert width > triton_launch.WIDEST["backward"]
    assert_judged(
        *norm((1.0, "after"), 1e-6), lambda _: {"x": x, "weight": weight_of(width, dtype)}, gradient_layout=layout
    )
    assert_judged(*norm((0.0, "after"), 1e-6), lambda _: {"x": x, "weight": None})


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    x = laid_out((4, 64), torch.float32, "contiguous", 1)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    weight = weight_of(64, torch.float32)
    result, expected = rms_norm(x, weight, None, 1e-6, 0.0, "before"), formula(x, weight, 1e-6)
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert result[1:3].isnan().any(-1).all() and result[[0, 3]].isfinite().all()


def test_without_eps_only_the_rows_that_are_there_count() -> None:
    """A program has room for more rows, each of zeros, than there are."""
    for shape in ((3, 16), (1, 24), (5, 100)):
        inputs = {"x": laid_out(shape, torch.float32, "contiguous", 1), "weight": weight_of(shape[1], torch.float32)}
        assert_judged(*norm((0.0, "before"), 0.0), lambda _, inputs=inputs: inputs)


def test_a_gradient_that_lies_along_more_dimensions_than_the_kernel_follows() -> None:
    for layout in ("a slice with gaps", "last dimension outermost"):
        assert_judged(
            *norm((0.0, "before"), 1e-5),
            lambda _: {"x": laid_out((2, 3, 2, 3, 16), torch.float32, "contiguous", 1), "weight": weight_of(16, None)},
            gradient_layout=layout,
        )


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", list(subsets(["x", "weight"])), ids="-".join)
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_second_derivatives_are_the_formulas(kind: tuple[float, str], needed: Collection[str]) -> None:
    inputs = {"x": laid_out((3, 16), torch.float32, "contiguous", 1), "weight": weight_of(16, torch.float32)}
    kernel, original, _ = norm(kind, 1e-5)
    ours, theirs = (second_derivatives(function, inputs, needed) for function in (kernel, original))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needed", list(subsets(["x", "gate", "weight"])), ids="-".join)
def test_second_derivatives_with_a_gate_are_the_formulas(needed: Collection[str]) -> None:
    inputs = {name: laid_out((3, 16), torch.float32, "contiguous", seed) for seed, name in enumerate(("x", "gate"))}
    inputs["weight"] = weight_of(16, torch.float32)
    ours, theirs = (second_derivatives(function, inputs, needed) for function in gated(1e-5)[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_gradient_to_be_differentiated_again_holds_its_own_part_only() -> None:
    """The gate here is computed from the input, whose gradient must not hold the gate's part twice."""
    results = []
    for function in gated(1e-5)[:2]:
        x = laid_out((3, 16), torch.float32, "contiguous", 1).requires_grad_()
        y = function(x=x, gate=2 * x, weight=weight_of(16, torch.float32))
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append([gradient.detach(), *torch.autograd.grad(gradient.square().sum(), x)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_costs_nothing(launched: list[Any]) -> None:  # noqa: F811
    x, weight = laid_out((5, 16), torch.float32, "contiguous", 1).requires_grad_(), weight_of(16, torch.float32)
    assert weight is not None
    rms_norm(x, weight, None, 1e-6, 0.0, "before").sum().backward()
    rms_norm(x, weight.requires_grad_(), None, 1e-6, 0.0, "before").sum().backward()
    needs = [program.launch.constants.get("NEEDS_DW") for program, _ in launched]
    assert needs == [None, False, None, True]


def _weight_gradient(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's gradient of a weight and the formula's in fp64."""
    weight = weight.detach().requires_grad_()
    (ours,) = torch.autograd.grad(rms_norm(x, weight, None, 1e-5, 0.0, "before").square().sum(), weight)
    exact = weight.detach().double().requires_grad_()
    y = formula(x.double(), exact, 1e-5, compute_dtype=torch.float64)
    return ours, torch.autograd.grad(y.square().sum(), exact)[0]


CALLS = by_device(
    # Programs that add up alone, in one group and in several; widths that come and go.
    [(3, 16), (900, 16), (9000, 8), (900, 16), (40, 100), (3, 16)],
    [(3, 128), (131072, 128), (4096, 4096), (100, 16384), (131072, 128), (33, 1000), (3, 128)],
)


def test_weight_gradients_of_many_calls_in_a_row() -> None:
    """Every launch finds its counters as zeros and leaves them so, whatever the launch before it was."""
    for rows, width in CALLS:
        x, weight = laid_out((rows, width), torch.float32, "contiguous", rows), weight_of(width, torch.float32)
        assert weight is not None
        for _ in range(2):
            torch.testing.assert_close(*_weight_gradient(x, weight), rtol=1e-4, atol=1e-4, check_dtype=False)


def test_weight_gradients_have_the_same_bits_on_every_run() -> None:
    rows, width = by_device((900, 16), (16384, 1024))
    x, weight = laid_out((rows, width), torch.bfloat16, "contiguous", 5), weight_of(width, torch.bfloat16)
    assert weight is not None
    runs = [_weight_gradient(x, weight)[0] for _ in range(by_device(2, 20))]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_streams_do_not_share_counters() -> None:
    cases = []
    for number, (rows, width) in enumerate(CALLS * 2):
        x, weight = laid_out((rows, width), torch.float32, "contiguous", number), weight_of(width, torch.float32)
        cases.append((x, weight, _weight_gradient(x, weight)[1]))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for number, (x, weight, _) in enumerate(cases):
            with torch.cuda.stream(streams[number % len(streams)]):
                leaf = weight.detach().requires_grad_()
                results.append(
                    torch.autograd.grad(rms_norm(x, leaf, None, 1e-5, 0.0, "before").square().sum(), leaf)[0]
                )
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        torch.testing.assert_close(result.double(), cases[number % len(cases)][2], rtol=1e-4, atol=1e-4)


# --- what is refused before a launch ----------------------------------------------------------------------------------


ONES = functools.partial(torch.ones, device=DEVICE)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a strided weight": ({"weight": ONES(32)[::2]}, "the weight is strided"),
    "a short weight": ({"weight": ONES(15)}, "not as long as the rows"),
    "one number as weight": ({"weight": ONES(1)}, "not as long as the rows"),
    "a gate of another shape": ({"gate": ONES(16)}, "a gate of another shape"),
    "a gate without a weight": ({"gate": ONES(3, 16), "weight": None}, "without a weight"),
    "a gate for wide rows": (
        {name: ONES(1, 16385)[0 if name == "weight" else slice(None)] for name in ("x", "gate", "weight")},
        "too wide for the gated kernel",
    ),
    "four dimensions of rows": ({"x": ONES(3, 3, 3, 3, 16)[::2, ::2, ::2, ::2]}, "more than three dimensions"),
    "no dimension": ({"x": ONES(())}, "no rows"),
    "fp64": ({"x": ONES(3, 16, dtype=torch.float64)}, "fp32, bf16, fp16"),
    "an fp64 weight": ({"weight": ONES(16, dtype=torch.float64)}, "fp32, bf16, fp16"),
    "another device": ({"weight": torch.ones(16, device="meta")}, "different devices"),
    "no elements": ({"x": ONES(0, 16)}, "an empty tensor"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_an_error_before_a_launch(changes: dict[str, Any], message: str) -> None:
    arguments = {"x": ONES(3, 16), "weight": ONES(16), "gate": None, **changes}
    with pytest.raises(ValueError, match=message):
        rms_norm(**arguments, eps=1e-6, offset=0.0, cast="before")


def test_the_layouts_are_what_they_are_called() -> None:
    made = {name: laid_out((2, 3, 4), torch.float32, name, 0) for name in LAYOUTS}
    assert {name for name, t in made.items() if t.is_contiguous()} == {"contiguous", "an odd storage offset"}
    assert {name for name, t in made.items() if t.stride(-1) != 1} == {
        "last dimension outermost",
        "every second column",
        "one number for all",
    }
    assert made["an odd storage offset"].data_ptr() % 16
    assert made["one row for all"].stride(0) == 0


def test_an_input_that_was_written_into_is_told_whose_it_was() -> None:
    """The original's fp32 copy would still be what it was."""
    x = torch.ones(4, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) * 1
    y = rms_norm(x, torch.ones(32, dtype=torch.bfloat16, device=DEVICE), None, 1e-6, 0.0, "before")
    x += y
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        x.sum().backward()
    assert "a kernel of twinkle, rms_norm by triton," in raised.value.__notes__[0]
