"""Our Triton kernels of ``qk_norm_rotary`` and ``add_rms_norm``: numbers, layouts, gradients, and what they refuse."""

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
from twinkle.kernel.ops.fused_norms import add_reference, add_triton, qk_reference, qk_triton
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.kernel.ops.rotary.reference import rotate

KINDS: list[tuple[float, str]] = [(0.0, "before"), (0.0, "after"), (1.0, "after")]
WIDTHS = by_device([1, 7, 16, 33, 64, 100], [1, 33, 128, 1000, 1536, 4096, 16384])
HEAD_DIMS = by_device([4, 6, 16, 20], [16, 64, 80, 128, 256])
HEADS = by_device([1, 2, 3, 5], [1, 3, 8, 32])
LENGTHS = by_device([1, 2], [1, 7, 257])


def functions(kernel: Any, reference: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The kernel, which must accept the call, the formula, and the formula in fp64."""

    def asked(**inputs: Any) -> Any:
        assert kernel.accepts_call(**inputs, **options) is None
        return kernel(**inputs, **options)

    exact = functools.partial(reference.original, **options, compute_dtype=torch.float64)
    return asked, functools.partial(reference.original, **options), exact


# --- norms and rotary -------------------------------------------------------------------------------------------------


def qk(**options: Any) -> tuple[Any, Any, Any]:
    usual = {"q_eps": 1e-5, "k_eps": 0.1, "offset": 0.0, "cast": "before", "heads_at": 2}
    return functions(qk_triton.qk_norm_rotary, qk_reference, **{**usual, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_norms_and_rotary_are_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    draw = data.draw
    (offset, cast), heads_at = draw(st.sampled_from(KINDS)), draw(st.sampled_from([1, 2]))
    batch, length, head_dim = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], LENGTHS, HEAD_DIMS))
    heads = {name: draw(st.sampled_from(HEADS)) for name in "qk"}
    turning = head_dim // 4 * 2 if draw(st.booleans()) else head_dim  # half of the head turns, or all
    weight_dtype, table_dtype = (draw(st.sampled_from([dtype, *DTYPES])) for _ in range(2))
    table = (draw(st.sampled_from([1, batch])), length, turning)
    lie = {name: draw(layouts) for name in ("q", "k", "cos", "sin")}
    needed = draw(st.sampled_from(list(subsets(["q", "k", "q_weight", "k_weight"]))))

    def inputs(number: int) -> dict[str, torch.Tensor]:
        def shape(name: str) -> tuple[int, ...]:
            return (batch, length, heads[name], head_dim) if heads_at == 2 else (batch, heads[name], length, head_dim)

        seeds = {name: 10 * number + seed for seed, name in enumerate(("q", "k", "q_weight", "k_weight", "cos", "sin"))}
        made = {name: laid_out(shape(name), dtype, lie[name], seeds[name]) for name in "qk"}
        made |= {n: laid_out((head_dim,), weight_dtype, "contiguous", seeds[n]) for n in ("q_weight", "k_weight")}
        return made | {name: laid_out(table, table_dtype, lie[name], seeds[name]) for name in ("cos", "sin")}

    options = {"offset": offset, "cast": cast, "heads_at": heads_at, "q_eps": 0.5 if head_dim < 8 else 1e-5}
    small = min(inputs(0)[name].numel() for name in "qk") < 16
    step = assert_judged(
        *qk(**options), inputs, times=4 if small else 1, needed=needed, gradient_layout=draw(gradient_layouts)
    )
    first = inputs(0)
    for name, output in zip("qk", step.outputs, strict=True):
        came = first[name].transpose(1, 2) if heads_at == 2 else first[name]
        assert output.shape == came.shape
        if is_dense(came):
            assert output.stride() == came.stride(), "laid out as the original's, so that nobody copies it"
    assert all(step.gradients[name].stride() == leaf.stride() for name, leaf in step.leaves.items() if is_dense(leaf))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "cast"), KINDS)
def test_it_rounds_where_norm_and_rotary_would(offset: float, cast: str, weight_dtype: torch.dtype) -> None:
    """But for a few numbers that lie in the middle between two: the judgement is content with fewer roundings."""
    inputs = small_qk(torch.bfloat16)
    inputs |= {name: inputs[name].to(weight_dtype) for name in ("q_weight", "k_weight")}
    fused = qk(offset=offset, cast=cast)[0]
    norms = [
        rms_norm(inputs[name], inputs[f"{name}_weight"], None, eps, offset, cast)
        for name, eps in (("q", 1e-5), ("k", 0.1))
    ]
    cos, sin = (inputs[name].float().unsqueeze(1) for name in ("cos", "sin"))
    for ours, normed in zip(fused(**inputs), norms, strict=True):
        assert ours.dtype == (weight_dtype if cast == "before" else torch.bfloat16)
        # A rotation's formula rounds three times, its kernels once.
        turned = rotate(normed.float().transpose(1, 2), cos, sin, qk_reference.DIALECT).to(ours.dtype)
        assert (ours != turned).float().mean() <= 0.02


def small_qk(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    shapes = {"q": (2, 5, 4, 16), "k": (2, 5, 2, 16), "q_weight": (16,), "k_weight": (16,)}
    shapes |= {"cos": (1, 5, 16), "sin": (1, 5, 16)}
    return {name: laid_out(shape, dtype, "contiguous", i) for i, (name, shape) in enumerate(shapes.items())} | changes


def test_calls_that_differ_in_nothing_but_a_tables_layout() -> None:
    """The launches are remembered, and must not be taken for one another."""
    fused, formula, _ = qk()
    for layout in ("contiguous", "every second column", "contiguous"):
        inputs = small_qk(sin=laid_out((1, 5, 16), torch.float32, layout, 5))
        torch.testing.assert_close(fused(**inputs), formula(**inputs))


def test_backwards_that_differ_in_nothing_but_a_gradients_layout() -> None:
    found = []
    for function in qk()[:2]:
        inputs = {name: tensor.requires_grad_(name[0] in "qk") for name, tensor in small_qk().items()}
        results, wrt = function(**inputs), [inputs[name] for name in ("q", "k", "q_weight", "k_weight")]
        for layout in ("contiguous", "two dimensions swapped", "every second column"):
            grads = [laid_out(r.shape, r.dtype, layout, seed) for seed, r in enumerate(results)]
            found.append(torch.autograd.grad(results, wrt, grads, retain_graph=True))
            found.append(torch.autograd.grad(results, wrt[:2], grads, retain_graph=True))
    torch.testing.assert_close(found[:6], found[6:], rtol=1e-4, atol=1e-5)


def test_one_launch_each_way(launched: Any) -> None:  # noqa: F811
    inputs = {name: tensor.requires_grad_(name[0] in "qk") for name, tensor in small_qk().items()}
    results = qk()[0](**inputs)
    assert len(launched) == 1
    torch.autograd.grad(results, [inputs[n] for n in ("q", "k", "q_weight")], [torch.ones_like(r) for r in results])
    assert len(launched) == 2


def test_many_heads_are_dealt_to_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes two heads at a time here; of keys there are fewer blocks than of queries."""
    from twinkle.kernel.ops.fused_norms import qk_launch

    monkeypatch.setattr(qk_launch, "tuned", lambda *_: (32, 4, 1))
    q, k = (laid_out((1, 3, heads, 16), torch.float32, "contiguous", heads) for heads in (7, 2))
    inputs = small_qk(cos=ones(1, 3, 16), sin=ones(1, 3, 16), q=q, k=k)
    assert_judged(*qk(), lambda _: inputs, needed={"q", "k", "q_weight", "k_weight"})


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy's, of the interpreter
def test_heads_that_only_fill_a_program_up_and_no_eps() -> None:
    """They must not bring infinities into the weights' gradients."""
    inputs = {name: tensor.requires_grad_(name[0] in "qk") for name, tensor in small_qk().items()}
    inputs["q"] = laid_out((2, 5, 3, 16), torch.float32, "contiguous", 3).requires_grad_()
    pair = qk(q_eps=0.0, k_eps=0.0)[:2]
    ours, theirs = ([r.sum() for r in function(**inputs)] for function in pair)
    gradients = [torch.autograd.grad(sum(r), [inputs["q_weight"], inputs["q"]]) for r in (ours, theirs)]  # type: ignore[arg-type]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("needed", [["q"], ["k_weight"], ["q", "k", "q_weight", "k_weight"]], ids=" ".join)
@pytest.mark.parametrize("heads_at", [1, 2])
def test_second_derivatives_of_norms_and_rotary(heads_at: int, needed: Collection[str]) -> None:
    inputs = small_qk()
    if heads_at == 1:
        inputs |= {name: inputs[name].transpose(1, 2).contiguous() for name in "qk"}
    ours, theirs = (second_derivatives(f, inputs, needed) for f in qk(heads_at=heads_at)[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


ones = functools.partial(torch.ones, device=DEVICE)

QK_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"q": ones(5, 4, 16), "k": ones(5, 2, 16)}, "four dimensions"),
    "tables without batch": ({"cos": ones(5, 16), "sin": ones(5, 16)}, "tables of three"),
    "a longer key": ({"k": ones(2, 6, 2, 16)}, "more than their heads"),
    "no key": ({"k": ones(2, 5, 0, 16)}, "empty"),
    "no tokens": ({"q": ones(2, 0, 4, 16), "k": ones(2, 0, 2, 16)}, "empty"),
    "a weight of all heads": ({"q_weight": ones(64)}, "as long as a head"),
    "a weight with gaps": ({"q_weight": ones(32)[::2]}, "strided"),
    "another batch": ({"cos": ones(3, 5, 16), "sin": ones(3, 5, 16)}, "as many as the batch"),
    "one position for all": ({"cos": ones(1, 1, 16), "sin": ones(1, 1, 16)}, "not as long as the sequence"),
    "an odd table": ({"cos": ones(1, 5, 7), "sin": ones(1, 5, 7)}, "doesn't fit the head"),
    "a wide table": ({"cos": ones(1, 5, 32), "sin": ones(1, 5, 32)}, "doesn't fit the head"),
    "cos and sin of two shapes": ({"sin": ones(2, 5, 16)}, "differ in shape"),
    "a key of another dtype": ({"k": ones(2, 5, 2, 16, dtype=torch.bfloat16)}, "differ in dtype"),
    "a weight of another dtype": ({"k_weight": ones(16, dtype=torch.bfloat16)}, "differ in dtype"),
    "a table that is learnt": ({"cos": ones(1, 5, 16).requires_grad_()}, "needs a gradient"),
    "fp64": ({"q": ones(2, 5, 4, 16, dtype=torch.float64)}, "fp32, bf16, fp16"),
    "very wide heads": (
        {"q": ones(2, 5, 4, 1024), "k": ones(2, 5, 2, 1024), "q_weight": ones(1024), "k_weight": ones(1024)},
        "more than 512 channels",
    ),
}


@pytest.mark.parametrize(("changes", "why"), QK_REFUSED.values(), ids=QK_REFUSED)
def test_calls_of_norms_and_rotary_that_are_left_alone(changes: dict[str, Any], why: str) -> None:
    options = {"q_eps": 1e-5, "k_eps": 1e-5, "offset": 0.0, "cast": "before", "heads_at": 2}
    assert qk_triton.qk_norm_rotary.accepts_call(**small_qk(), **options) is None  # type: ignore[attr-defined]
    assert why in qk_triton.qk_norm_rotary.accepts_call(**small_qk(**changes), **options)  # type: ignore[attr-defined]


# --- sum and norm -----------------------------------------------------------------------------------------------------


def add(**options: Any) -> tuple[Any, Any, Any]:
    return functions(add_triton.add_rms_norm, add_reference, **{"eps": 1e-5, "offset": 0.0, "cast": "before"} | options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@examples
@given(data=st.data())
def test_a_sum_and_its_norm_are_within_the_judgement(dtype: torch.dtype, data: st.DataObject) -> None:
    draw = data.draw
    rows = draw(st.sampled_from(by_device([(1,), (7,), (2, 3), (33,)], [(1,), (1000,), (4, 1023)])))
    width, (offset, cast) = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(KINDS))
    other_dtype, weight_dtype = (draw(st.sampled_from([dtype, *DTYPES])) for _ in range(2))
    needed = draw(st.sampled_from(list(subsets(["residual", "summand", "weight"]))))

    def inputs(number: int) -> dict[str, torch.Tensor]:
        return {
            "residual": laid_out((*rows, width), dtype, "contiguous", 10 * number + 1),
            "summand": laid_out((*rows, width), other_dtype, "contiguous", 10 * number + 2),
            "weight": laid_out((width,), weight_dtype, "contiguous", 10 * number + 3),
        }

    options = {"offset": offset, "cast": cast, "eps": 0.5 if width < 8 else 1e-5}
    times = times_for(rows, width)
    assert_judged(*add(**options), inputs, times=times, needed=needed, gradient_layout=draw(gradient_layouts))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "cast"), KINDS)
def test_it_rounds_where_sum_and_norm_would(offset: float, cast: str, weight_dtype: torch.dtype) -> None:
    residual, summand = (laid_out((7, 64), torch.bfloat16, "contiguous", seed) for seed in (1, 2))
    weight = laid_out((64,), weight_dtype, "contiguous", 3)
    total, normed = add(offset=offset, cast=cast)[0](residual=residual, summand=summand, weight=weight)
    assert torch.equal(total, residual + summand)
    assert torch.equal(normed, rms_norm(total, weight, None, 1e-5, offset, cast))


def small_add(**changes: Any) -> dict[str, Any]:
    shapes = {"residual": (2, 3, 16), "summand": (2, 3, 16), "weight": (16,)}
    return {n: laid_out(shape, torch.float32, "contiguous", i) for i, (n, shape) in enumerate(shapes.items())} | changes


def test_sums_that_differ_in_nothing_but_a_dtype() -> None:
    fused, formula, _ = add()
    for changed in ("nothing", "summand", "residual", "weight", "nothing"):
        inputs = {name: t.to(torch.float32 if name == changed else torch.bfloat16) for name, t in small_add().items()}
        for ours, theirs in zip(fused(**inputs), formula(**inputs), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_sums_gradient_alone_and_the_norms_alone() -> None:
    for number in range(2):
        found = []
        for function in add()[:2]:
            inputs = {name: tensor.requires_grad_() for name, tensor in small_add().items()}
            result = function(**inputs)[number].square().sum()
            found.append(torch.autograd.grad(result, [inputs["residual"], inputs["summand"]]))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("needed", [["residual"], ["weight"], ["residual", "summand", "weight"]], ids=" ".join)
def test_second_derivatives_of_a_sum_and_its_norm(needed: Collection[str]) -> None:
    ours, theirs = (second_derivatives(f, small_add(), needed) for f in add()[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


ADD_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a row for all": ({"summand": ones(16)}, "differ in shape"),
    "gaps": ({"residual": ones(2, 3, 32)[..., ::2]}, "with gaps"),
    "a longer weight": ({"weight": ones(17)}, "as long as the rows"),
    "a weight with gaps": ({"weight": ones(32)[::2]}, "strided"),
    "nothing": ({"residual": ones(0, 16), "summand": ones(0, 16)}, "empty"),
    "fp64": ({"summand": ones(2, 3, 16, dtype=torch.float64)}, "fp32, bf16, fp16"),
    "wide rows": (
        {"residual": ones(1, 16385), "summand": ones(1, 16385), "weight": ones(16385)},
        "more than 16384 numbers",
    ),
}


@pytest.mark.parametrize(("changes", "why"), ADD_REFUSED.values(), ids=ADD_REFUSED)
def test_calls_of_a_sum_and_its_norm_that_are_left_alone(changes: dict[str, Any], why: str) -> None:
    options = {"eps": 1e-5, "offset": 0.0, "cast": "before"}
    assert add_triton.add_rms_norm.accepts_call(**small_add(), **options) is None  # type: ignore[attr-defined]
    assert why in add_triton.add_rms_norm.accepts_call(**small_add(**changes), **options)  # type: ignore[attr-defined]
