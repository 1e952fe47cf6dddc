"""Our Triton kernel of ``rotary``: every dialect and signature, layouts, gradients, and what it leaves alone."""

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
    Step,
    assert_judged,
    by_device,
    examples,
    gradient_layouts,
    is_dense,
    laid_out,
    layouts,
    layouts_told_apart,  # noqa: F401
    second_derivatives,
    subsets,
)
from twinkle.kernel.ops.rotary import reference
from twinkle.kernel.ops.rotary.reference import DIALECTS, SIGNATURES, Dialect, RotaryVariant
from twinkle.kernel.ops.rotary.triton import load
from twinkle.kernel.targets import Site

HEADS = by_device([1, 2, 3, 5], [1, 3, 8, 32])
LENGTHS = by_device([1, 3], [1, 7, 257])
HEAD_DIMS = by_device([4, 6, 16, 20], [4, 16, 80, 128, 256])


def kernel_of(variant: RotaryVariant, dtype: torch.dtype) -> Any:
    site = Site(None, "rotary", None, "rotary", None, torch.device(DEVICE), dtype, variant)  # type: ignore[arg-type]
    return load(None, site)


def functions(variant: RotaryVariant, dtype: torch.dtype, **options: Any) -> tuple[Any, Any, Any]:
    """The kernel, the formula and the formula in fp64, with options such as ``unsqueeze_dim``."""
    kernel = kernel_of(variant, dtype)

    def asked(*args: Any, **kwargs: Any) -> Any:
        assert kernel.accepts_call(*args, **kwargs) is None
        return kernel(*args, **kwargs)

    exact = reference.build(variant, torch.float64)
    return tuple(functools.partial(f, **options) for f in (asked, reference.build(variant), exact))  # type: ignore[return-value]


def draw_case(draw: Any, dtype: torch.dtype) -> tuple[RotaryVariant, dict[str, Any], Any]:
    """A variant, options of the call, and a function ``number -> inputs``."""
    dialect, parameters = draw(st.sampled_from(DIALECTS)), draw(st.sampled_from(SIGNATURES))
    head_dim, length = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(LENGTHS))
    width = head_dim // 4 * 2 if draw(st.booleans()) else head_dim  # half of the head turns, or all
    table_dtype = draw(st.sampled_from(DTYPES))
    batch = draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {}
    table = width // 2 if dialect.table == "half_width" else width
    shape: tuple[int, ...]
    if "unsqueeze_dim" in parameters:
        heads_at = draw(st.sampled_from([0, 1, 2]))
        options["unsqueeze_dim"] = heads_at
        shape = (batch, length, -1, head_dim) if heads_at == 2 else (batch, -1, length, head_dim)
        table_shape = (draw(st.sampled_from([1, batch])), length, table) if heads_at else (length, table)
    else:
        shape, table_shape = (length, -1, head_dim), (length, table)
    names = parameters[: parameters.index("cos")]
    heads = {name: draw(st.sampled_from(HEADS)) for name in names}
    lie = {name: draw(layouts) for name in (*names, "cos", "sin")}

    def inputs(number: int) -> dict[str, torch.Tensor]:
        made = {}
        for seed, name in enumerate(lie):
            whole = table_shape if name in ("cos", "sin") else [heads[name] if n == -1 else n for n in shape]
            kind = table_dtype if name in ("cos", "sin") else dtype
            made[name] = laid_out(whole, kind, lie[name], 10 * number + seed)
        return made

    return RotaryVariant(dialect, True, parameters), options, inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_a_rotation_is_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    variant, options, inputs = draw_case(data.draw, dtype)
    names = list(inputs(0))[: variant.tensors]
    needed = data.draw(st.sampled_from(list(subsets(names))))
    small = min(inputs(0)[name].numel() for name in names) < 16
    step: Step = assert_judged(
        *functions(variant, dtype, **options),
        inputs,
        times=4 if small else 1,
        needed=needed,
        gradient_layout=data.draw(gradient_layouts),
    )
    first = inputs(0)
    for name, output in zip(names, step.outputs, strict=True):
        if is_dense(first[name]):
            assert output.stride() == first[name].stride()
    assert all(step.gradients[name].stride() == leaf.stride() for name, leaf in step.leaves.items() if is_dense(leaf))


@pytest.mark.parametrize("dialect", DIALECTS, ids=[str(number) for number in range(len(DIALECTS))])
def test_every_dialect(dialect: Dialect) -> None:
    """Whole heads and halves, with and without a wider table: what the property test may not draw in few examples."""
    for parameters, head_dim, width, table_dtype in (
        (SIGNATURES[0], 16, 16, torch.bfloat16),
        (SIGNATURES[0], 20, 8, torch.float32),
        (SIGNATURES[-1], 20, 20, torch.float32),
        (SIGNATURES[-1], 16, 8, torch.bfloat16),
    ):
        table = width // 2 if dialect.table == "half_width" else width
        shapes = {name: (1, heads, 3, head_dim) for name, heads in (("x", 3), ("q", 3), ("k", 2))}
        names = parameters[: parameters.index("cos")]
        inputs = {n: laid_out(shapes[n], torch.bfloat16, "contiguous", i) for i, n in enumerate(names)}
        inputs |= {n: laid_out((1, 3, table), table_dtype, "contiguous", 7 + i) for i, n in enumerate(("cos", "sin"))}
        step = assert_judged(
            *functions(RotaryVariant(dialect, True, parameters), torch.bfloat16),
            lambda _, i=inputs: i,
            needed=set(names),
        )
        assert all(output.is_contiguous() for output in step.outputs)


def test_a_gradient_of_one_result_only() -> None:
    """Autograd hands zeros for the other."""
    inputs = {n: laid_out((1, 2, 3, 8), torch.float32, "contiguous", i).requires_grad_() for i, n in enumerate("qk")}
    tables = {n: laid_out((1, 3, 8), torch.float32, "contiguous", 5 + i) for i, n in enumerate(("cos", "sin"))}
    ours, theirs, _ = functions(RotaryVariant(Dialect(), True, SIGNATURES[0]), torch.float32)
    gradients = [torch.autograd.grad(f(**inputs, **tables)[1].square().sum(), list(inputs.values()), allow_unused=True)
                 for f in (ours, theirs)]  # fmt: skip
    torch.testing.assert_close(gradients[0][1], gradients[1][1])
    assert gradients[1][0] is None and gradients[0][0] is not None and not gradients[0][0].any()


@pytest.mark.parametrize(("number", "needed"), [(0, {"q"}), (2, {"k"}), (4, {"q"}), (7, {"q", "k"}), (8, {"q", "k"})])
def test_second_derivatives_are_the_formulas(number: int, needed: Collection[str]) -> None:
    dialect = DIALECTS[number]
    for unsqueeze_dim, shape in ((1, (2, 2, 3, 8)), (2, (2, 3, 2, 8)), (0, (2, 2, 3, 8))):
        width = 4 if dialect.table == "half_width" else 8
        table = (2, 3, width) if unsqueeze_dim else (3, width)
        inputs = {n: laid_out(shape, torch.float32, "contiguous", i) for i, n in enumerate("qk")}
        inputs |= {n: laid_out(table, torch.float32, "contiguous", 5 + i) for i, n in enumerate(("cos", "sin"))}
        pair = functions(RotaryVariant(dialect, True, SIGNATURES[0]), torch.float32, unsqueeze_dim=unsqueeze_dim)[:2]
        ours, theirs = (second_derivatives(f, inputs, needed) for f in pair)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_second_derivatives_without_a_batch_are_the_formulas() -> None:
    inputs = {n: laid_out((5, 3, 8), torch.float32, "contiguous", i) for i, n in enumerate("qk")}
    inputs |= {n: laid_out((5, 8), torch.float32, "contiguous", 5 + i) for i, n in enumerate(("cos", "sin"))}
    pair = functions(RotaryVariant(DIALECTS[2], True, SIGNATURES[1]), torch.float32)[:2]
    ours, theirs = (second_derivatives(f, inputs, {"q", "k"}) for f in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# --- call by call -----------------------------------------------------------------------------------------------------


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that the kernel takes, but for the changes: shapes, or ``(shape, dtype)``."""
    shapes: dict[str, Any] = {"q": (2, 4, 5, 16), "k": (2, 2, 5, 16), "cos": (2, 5, 16), "sin": (2, 5, 16), **changes}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        if isinstance(shape, (torch.Tensor, int)):
            tensors[name] = shape
            continue
        shape, dtype = shape if isinstance(shape[-1], torch.dtype) else (shape, torch.float32)
        tensors[name] = torch.ones(shape, dtype=dtype, device=DEVICE)
    return tensors


ONES = functools.partial(torch.ones, device=DEVICE)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads before the sequence, said otherwise": ({"unsqueeze_dim": 2}, "more than their heads"),
    "a place from the end": ({"unsqueeze_dim": -3}, "a place for the heads"),
    "a table without batch": ({"cos": (5, 16), "sin": (5, 16)}, "a place for the heads"),
    "another batch": ({"cos": (3, 5, 16), "sin": (3, 5, 16)}, "as many as the batch"),
    "one position for all": ({"cos": (2, 1, 16), "sin": (2, 1, 16)}, "not as long as the sequence"),
    "a longer key": ({"k": (2, 2, 6, 16)}, "more than their heads"),
    "a key of another batch": ({"k": (1, 2, 5, 16)}, "more than their heads"),
    "a key with wider heads": ({"k": (2, 2, 5, 32)}, "more than their heads"),
    "a key without batch": ({"k": (2, 5, 16)}, "more than their heads"),
    "a table wider than the head": ({"cos": (2, 5, 32), "sin": (2, 5, 32)}, "doesn't fit the head"),
    "an odd table": ({"cos": (2, 5, 7), "sin": (2, 5, 7)}, "doesn't fit the head"),
    "an empty table": ({"cos": (2, 5, 0), "sin": (2, 5, 0)}, "doesn't fit the head"),
    "cos and sin of two shapes": ({"sin": (1, 5, 16)}, "differ in shape"),
    "cos and sin of two dtypes": ({"sin": ((2, 5, 16), torch.bfloat16)}, "differ in dtype"),
    "a key of another dtype": ({"k": ((2, 2, 5, 16), torch.bfloat16)}, "differ in dtype"),
    "fp64": ({"q": ((2, 4, 5, 16), torch.float64), "k": ((2, 2, 5, 16), torch.float64)}, "fp32, bf16, fp16"),
    "another device": ({"k": torch.ones(2, 2, 5, 16, device="meta")}, "different devices"),
    "no tokens": ({"q": (2, 4, 0, 16), "k": (2, 2, 0, 16), "cos": (2, 0, 16), "sin": (2, 0, 16)}, "empty"),
    "no heads": ({"k": (2, 0, 5, 16)}, "empty"),
    "a table that is learnt": ({"cos": ONES(2, 5, 16).requires_grad_()}, "needs a gradient"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_that_the_kernel_does_not_take(changes: dict[str, Any], message: str) -> None:
    rotary = kernel_of(RotaryVariant(Dialect(), True, SIGNATURES[0]), torch.float32)
    assert rotary.accepts_call(**call()) is None
    assert message in rotary.accepts_call(**call(**changes))


def test_a_table_narrower_than_the_head_needs_a_partial_original() -> None:
    whole, partial = (kernel_of(RotaryVariant(Dialect(), p, SIGNATURES[0]), torch.float32) for p in (False, True))
    narrow = call(cos=(2, 5, 8), sin=(2, 5, 8))
    assert "doesn't fit the head" in whole.accepts_call(**narrow)
    assert partial.accepts_call(**narrow) is None


def test_calls_that_differ_in_nothing_but_the_tables_batch() -> None:
    """The launches are remembered: those of a table for all and of one for each must not be taken for one another."""
    rotary, formula, _ = functions(RotaryVariant(Dialect(), True, SIGNATURES[0]), torch.float32)
    q, k = (laid_out((2, h, 5, 16), torch.float32, "contiguous", h) for h in (4, 2))
    tables = [laid_out((2, 5, 16), torch.float32, "contiguous", 5 + i) for i in range(2)]
    for size in (2, 1, 2):
        cos, sin = (table[:size] for table in tables)
        torch.testing.assert_close(rotary(q, k, cos, sin), formula(q, k, cos, sin))
