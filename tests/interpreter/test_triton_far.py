"""Tensors whose elements lie further apart than 32 bits count: views of huge storages that nobody touches otherwise.

Each test reads, and each but the last writes, beyond 2**31 elements in every dimension that a kernel walks along.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.triton_device import DEVICE, NO_GPU, ON_GPU, laid_out
from twinkle.kernel.ops.glu import triton as glu_backend
from twinkle.kernel.ops.rms_norm import triton_launch
from twinkle.kernel.ops.rms_norm.reference import rms_norm as norm_formula
from twinkle.kernel.ops.rms_norm.triton import rms_norm
from twinkle.kernel.ops.rotary import triton as rotary_backend
from twinkle.kernel.ops.rotary.reference import DIALECTS, rotate
from twinkle.triton_programs import Program

pytestmark = pytest.mark.xdist_group("far")  # one after the other: each takes some ten GB of a GPU

FAR = 2**31 + 64


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def huge(elements: int) -> torch.Tensor:
    """A bf16 storage of that many elements, of which no page exists until it is written to."""
    if ON_GPU:
        return torch.empty(elements, dtype=torch.bfloat16, device=DEVICE)
    no_reserve = 0x4000  # of Linux, where Triton runs; Python 3.11 has no name for it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


def apart(values: torch.Tensor, dimension: int, storage: torch.Tensor | None = None) -> torch.Tensor:
    """The values with a huge stride in one dimension."""
    strides, step = [0] * values.dim(), 1
    for d in reversed(range(values.dim())):
        if d != dimension:
            strides[d], step = step, step * values.shape[d]
    strides[dimension] = -(-FAR // (values.shape[dimension] - 1)) // 64 * 64 + 64  # the last one lies beyond
    reach = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)) + 1
    assert reach > 2**31
    view = (huge(reach) if storage is None else storage).as_strided(values.shape, strides)
    return view.copy_(values)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dimension", (0, 1, 2))
def test_a_norm(dimension: int) -> None:
    """Rows apart in either row dimension, or columns apart."""
    shape, kind = (2, 3, 16), (1e-5, 0.0, "before")
    plain = {name: laid_out(shape, torch.bfloat16, "contiguous", i) for i, name in enumerate(("x", "dy"))}
    weight = laid_out((16,), torch.bfloat16, "contiguous", 3)
    exact = plain["x"].double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    expected = norm_formula(exact, exact_weight, 1e-5, compute_dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (exact, exact_weight), plain["dy"].double())

    x, dy = (apart(plain[name], dimension) for name in ("x", "dy"))
    # As autograd calls it: results are in plain memory.
    leaf, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = rms_norm(leaf, leaf_weight, None, *kind)
    close(y, expected)
    for ours, theirs in zip(torch.autograd.grad(y, (leaf, leaf_weight), dy), gradients, strict=True):
        close(ours, theirs)
    # And with results that lie apart, too.
    y, dx, dw = apart(torch.zeros_like(plain["x"]), dimension), apart(torch.zeros_like(x), dimension), weight.clone()
    triton_launch.forward(Program, x, weight, None, y, kind)(x, weight, None, y)
    results = dx, dw, None
    triton_launch.backward(Program, dy, x, weight, None, results, *kind[:2])(dy, x, weight, None, *results)
    for ours, theirs in zip((y, dx, dw), (expected, *gradients), strict=True):
        close(ours, theirs)


def test_a_wide_norm() -> None:
    shape, weight = (2, 16400), laid_out((16400,), torch.bfloat16, "contiguous", 3)
    plain = [laid_out(shape, torch.bfloat16, "contiguous", seed) for seed in (1, 2)]
    exact = plain[0].double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    expected = norm_formula(exact, exact_weight, 1e-5, compute_dtype=torch.float64)
    gradients = torch.autograd.grad(expected, (exact, exact_weight), plain[1].double())
    for dimension in (0, 1):
        x, dy = (apart(t, dimension).detach() for t in plain)
        leaves = x.requires_grad_(), weight.detach().requires_grad_()
        y = rms_norm(*leaves, None, 1e-5, 0.0, "before")
        for ours, theirs in zip((y, *torch.autograd.grad(y, leaves, dy)), (expected, *gradients), strict=True):
            close(ours, theirs)


def test_a_gated_norm() -> None:
    plain = [laid_out((3, 16), torch.bfloat16, "contiguous", seed) for seed in (1, 2, 3)]
    weight = laid_out((16,), torch.bfloat16, "contiguous", 4)
    results = []
    for dimension in (None, 0, 1):
        x, gate, dy = plain if dimension is None else (apart(t, dimension) for t in plain)
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_(), gate.detach().requires_grad_()
        y = rms_norm(*leaves, 1e-5, 0.0, "before")
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for ours, theirs in itertools.product(results[1:], results[:1]):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_a_product(activation: str) -> None:
    gate, up, grad = (laid_out((3, 16), torch.bfloat16, "contiguous", seed) for seed in (1, 2, 3))
    expected = glu_backend.glu(leaf := gate.detach().requires_grad_(), up, activation)
    (dgate,) = torch.autograd.grad(expected, leaf, grad)
    outputs = [apart(torch.zeros_like(gate), 0) for _ in range(3)]
    far_gate, far_up, far_grad = (apart(t, 0) for t in (gate, up, grad))
    for direction, tensors in (
        ("forward", (far_gate, far_up, outputs[0])),
        ("backward", (far_grad, far_gate, far_up, *outputs[1:])),
    ):
        glu_backend._launched(Program, direction, tensors, activation)(*tensors)
    assert torch.equal(outputs[0], expected) and torch.equal(outputs[1], dgate)


@pytest.mark.parametrize("dimension", (0, 1, 2, 3), ids=("batch", "heads", "tokens", "channels"))
@pytest.mark.parametrize("number", (0, 7, 8))
def test_a_rotation(number: int, dimension: int) -> None:
    dialect = DIALECTS[number]
    plain = [laid_out((2, 3, 2, 16), torch.bfloat16, "contiguous", seed) for seed in (1, 2)]
    width = 4 if dialect.table == "half_width" else 8
    cos, sin = (laid_out((2, 2, width), torch.bfloat16, "contiguous", seed) for seed in (3, 4))
    far_tables = [apart(t, {0: 0, 2: 1, 3: 2}.get(dimension, 0)) for t in (cos, sin)]
    inputs = tuple(apart(t, dimension) for t in plain)
    outputs = tuple(apart(torch.zeros_like(t), dimension) for t in plain)

    def run(inputs: Any, outputs: Any, tables: Any, backward: bool) -> None:
        program = rotary_backend._launched(Program, inputs, outputs, *tables, number, 1, backward)
        program(*inputs, *outputs, *tables)

    run(inputs, outputs, far_tables, False)
    for ours, values in zip(outputs, plain, strict=True):
        tables = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
        close(ours, rotate(values.double(), *tables, dialect, torch.float64))
    back = tuple(apart(torch.zeros_like(t), dimension) for t in plain)
    run(outputs, back, far_tables, True)
    plainly = tuple(torch.zeros_like(t) for t in plain)
    dense = tuple(t.contiguous() for t in outputs)
    run(dense, plainly, (cos, sin), True)
    assert all(map(torch.equal, back, plainly))


@pytest.mark.skipif(not ON_GPU, reason=NO_GPU)
def test_dense_tensors_of_more_than_two_to_the_31_elements() -> None:
    """What is written into plain memory: results and gradients of a norm and a product, in their last rows."""
    rows, width = 2**31 // 4096 + 5, 4096
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    weight = laid_out((width,), torch.bfloat16, "contiguous", 3)
    y = rms_norm(x, weight, None, 1e-5, 0.0, "before")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    for part in (slice(0, 2), slice(-3, None)):
        exact = x.detach()[part].double().requires_grad_()
        expected = norm_formula(exact, weight.double(), 1e-5, compute_dtype=torch.float64)
        close(y[part], expected)
        close(dx[part], torch.autograd.grad(expected, exact, y.detach()[part].double())[0])
    del dx
    up = y.detach()
    product = glu_backend.glu(x.detach(), up, "silu")
    for part in (slice(0, 2), slice(-3, None)):
        close(product[part], torch.nn.functional.silu(x.detach()[part].double()) * up[part].double())
