"""Experts by our Triton programs: every layout, gate, choice of experts and dtype, both ways; whole models."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.experts import (
    FAMILIES,
    assert_leaves_some_calls_to_the_original,
    assert_only_wanted_gradients,
    assert_serves_a_family,
    assert_within_the_judgement,
    gates,
    made,
    results,
    variants,
)
from tests.support.models import clean_process  # noqa: F401
from tests.support.triton_device import DEVICE, DTYPES, by_device, examples
from twinkle.kernel.ops.moe import torch_products, triton_launch, triton_products
from twinkle.kernel.ops.moe import triton as backend
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant, moe_experts
from twinkle.kernel.ops.moe.routing import route
from twinkle.kernel.ops.moe.triton_routing import route as triton_route
from twinkle.kernel.verify import allowed_error_used
from twinkle.triton_dot import multiplies

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small sizes have several of each kind."""
    set_tiles(monkeypatch, 16)


def set_tiles(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """Where Triton is interpreted."""
    for name in ("UP", "ROWS", "GATE_BACKWARD", "WEIGHT"):
        if DEVICE == "cpu":
            monkeypatch.setattr(triton_launch, name, triton_launch.Tiles(side, side, side, 4, 2, group=2))


@contextlib.contextmanager
def by(products: Any) -> Iterator[None]:
    """Everything by these products."""
    before, backend.products_for = backend.products_for, lambda *_: products  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.products_for = before


def ours(x: Any, index: Any, weights: Any, stacks: Any, variant: MoeExpertsVariant) -> torch.Tensor:
    return backend._experts(x, weights, *stacks, index, variant)


SIZES = by_device(
    [(13, 24, 20, 5, 2), (1, 8, 8, 2, 1), (7, 17, 33, 3, 3), (40, 16, 16, 9, 8), (5, 40, 6, 1, 1)],
    [(513, 256, 192, 8, 2), (1, 64, 64, 2, 1), (300, 200, 264, 3, 3), (1000, 128, 128, 64, 8), (65, 96, 40, 1, 1)],
)


@examples
@given(
    variant=variants,
    sizes=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    strangers=st.booleans(),
)
def test_output_and_gradients_are_within_the_judgement(
    variant: MoeExpertsVariant, sizes: tuple[int, ...], dtype: torch.dtype, seed: int, strangers: bool
) -> None:
    inputs, index = made(variant, sizes, dtype, seed, strangers)
    with by(triton_products):
        found = results(ours, inputs, index, variant, dtype)
    assert_within_the_judgement(found, inputs, index, variant, dtype)


@examples
@given(
    gate=gates,
    transposed=st.booleans(),
    sizes=st.sampled_from([(13, 32, 16, 5, 2), (1, 24, 40, 2, 1), (40, 16, 16, 9, 8)]),
    seed=st.integers(0, 100),
    strangers=st.booleans(),
)
def test_with_pytorchs_products(
    gate: Gate, transposed: bool, sizes: tuple[int, ...], seed: int, strangers: bool
) -> None:
    variant = MoeExpertsVariant(gate, transposed)
    inputs, index = made(variant, sizes, torch.bfloat16, seed, strangers)
    stacks = inputs["gate_up"], inputs["down"], None, None
    assert backend.products_for(inputs["x"], stacks, variant) is torch_products
    found = results(ours, inputs, index, variant, torch.bfloat16)
    assert_within_the_judgement(found, inputs, index, variant, torch.bfloat16)


def test_what_pytorchs_products_cant_take() -> None:
    plain = MoeExpertsVariant(Gate("silu"))

    def chosen(variant: MoeExpertsVariant, sizes: tuple[int, ...], dtype: torch.dtype) -> Any:
        inputs, _ = made(variant, sizes, dtype, 0, False)
        stacks = tuple(inputs.get(name) for name in ("gate_up", "down", "gate_up_bias", "down_bias"))
        return backend.products_for(inputs["x"], stacks, variant)

    fitting = (13, 32, 16, 5, 2)
    assert chosen(plain, fitting, torch.bfloat16) is torch_products
    assert chosen(plain, fitting, torch.float32) is chosen(plain, fitting, torch.float16) is triton_products
    assert chosen(plain, (13, 20, 16, 5, 2), torch.bfloat16) is triton_products
    for variant in (MoeExpertsVariant(Gate("silu"), bias=True), MoeExpertsVariant(Gate("silu"), interleaved=True)):
        assert chosen(variant, fitting, torch.bfloat16) is triton_products
    inputs, _ = made(plain, fitting, torch.bfloat16, 0, False)
    wider = torch.zeros(5, 32, 36, dtype=torch.bfloat16, device=DEVICE)[..., :32]  # rows begin every 72 bytes
    assert wider.shape == inputs["gate_up"].shape
    assert backend.products_for(inputs["x"], (wider, inputs["down"], None, None), plain) is triton_products


@pytest.mark.parametrize("frozen", [("x", "weights"), ("gate_up", "down"), ("x", "gate_up"), ("weights", "down")])
def test_only_the_gradients_that_are_wanted(frozen: tuple[str, ...]) -> None:
    assert_only_wanted_gradients(ours, SIZES[0], frozen)


def test_inputs_as_they_lie() -> None:
    """Rows apart, columns apart, and stacks that are views of larger ones."""
    variant = MoeExpertsVariant(Gate("silu"))
    inputs, index = made(variant, SIZES[0], torch.float32, 1, False)
    expected = results(ours, inputs, index, variant, torch.float32)
    tokens, hidden = inputs["x"].shape
    experts, width, inner = inputs["down"].shape
    strided = {
        "x": torch.zeros(tokens, 2 * hidden, device=DEVICE)[:, ::2],
        "weights": torch.zeros(inputs["weights"].shape[::-1], device=DEVICE).t(),
        "gate_up": torch.zeros(2, *inputs["gate_up"].shape, device=DEVICE).transpose(0, 1)[:, 1],
        "down": torch.zeros(experts, width, 3 * inner, device=DEVICE)[..., 5 : 5 + inner],
    }
    for name, tensor in strided.items():
        tensor.copy_(inputs[name]).requires_grad_()
    stacks = strided["gate_up"], strided["down"], None, None
    out = ours(strided["x"], index.t().contiguous().t(), strided["weights"], stacks, variant)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    found = torch.autograd.grad(out, list(strided.values()), grad.t().contiguous().t())
    assert torch.equal(out, expected["output"])
    for name, gradient in zip(strided, found, strict=True):
        assert torch.equal(gradient, expected[name]), name


def test_its_gradient_can_be_differentiated() -> None:
    variant = MoeExpertsVariant(Gate("silu"))
    inputs, index = made(variant, SIZES[0], torch.float32, 2, False)

    def second(function: Any, dtype: torch.dtype) -> torch.Tensor:
        x, weights, gate_up, down = (inputs[name].to(dtype) for name in ("x", "weights", "gate_up", "down"))
        x = x.clone().requires_grad_()
        out = function(x, index, weights, (gate_up, down, None, None), variant)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    found, theirs, exact = (
        second(ours, torch.float32),
        second(moe_experts, torch.float32),
        second(moe_experts, torch.float64),
    )
    assert allowed_error_used(found, theirs, exact) <= 1


@pytest.mark.parametrize("find", [route, triton_route])
def test_the_route(find: Any) -> None:
    index = torch.tensor([[2, 0], [4, 2], [0, -1], [2, 1]], device=DEVICE)
    found = find(index, 4)
    assert found.ends.tolist() == [2, 3, 6, 6]
    assert found.slots[:6].tolist() == [1, 4, 7, 0, 3, 6], "by expert, in the tokens' order"
    assert found.places.tolist() == [[3, 0], [-1, 4], [1, -1], [5, 2]]


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (7, 3, 2), (200, 5, 3), (90, 128, 8), (40, 513, 4)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_route_in_programs_is_the_same(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    """With experts that nobody chose, several blocks, and choices of experts that there are not."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(DEVICE, dtype)
    found, expected = triton_route(index.t().contiguous().t(), experts), route(index, experts)
    count = int(expected.ends[-1])
    assert torch.equal(found.ends, expected.ends) and torch.equal(found.places, expected.places)
    assert torch.equal(found.slots[:count], expected.slots[:count]) and not found.slots[count:].any()
    assert [t.dtype for t in found[:3]] == [t.dtype for t in expected[:3]] and found.top_k == top_k


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, 64)  # an interpreter takes about as long for a tile of any size
    assert_serves_a_family(name, "triton")


def test_calls_that_are_the_originals() -> None:
    assert_leaves_some_calls_to_the_original("triton")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="not run: nothing is interpreted here")
def test_what_the_interpreter_multiplies_wrongly_is_left_to_the_original() -> None:
    """In a process in which nobody has mended it, as these tests have."""
    assert multiplies(torch.bfloat16)
    code = """
import torch
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant
from twinkle.kernel.ops.moe.triton import _interpreter_reason
for width in (16, 20):  # rows of 40 bytes aren't for PyTorch's products
    for dtype in (torch.bfloat16, torch.float16):
        x, up, down = (torch.ones(*shape, dtype=dtype) for shape in ((4, 16), (2, 2 * width, 16), (2, 16, width)))
        print(width, dtype, _interpreter_reason(x, (up, down, None, None), MoeExpertsVariant(Gate("silu"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "16 torch.bfloat16 None",
        "16 torch.float16 None",
        "20 torch.bfloat16 Triton's interpreter gives wrong products of torch.bfloat16",
        "20 torch.float16 None",
    ]
