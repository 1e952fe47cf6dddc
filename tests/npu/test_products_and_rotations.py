"""``swiglu``, ``geglu`` and ``rotary``: what a call may be, and what is made of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


from tests.kernel.test_multimodal_rotary import rotated
from tests.support.npu_inputs import site, tensor
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.install import kernel_for
from twinkle.kernel.ops.glu import npu as glu
from twinkle.kernel.ops.glu.reference import ACTIVATIONS
from twinkle.kernel.ops.rotary import multimodal_reference, reference
from twinkle.kernel.ops.rotary import npu as rotary
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site, Target
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, check_site

# --- gated MLPs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma", "glm"])
def test_frozen_norms_and_odd_projections(name: str) -> None:
    """What the projections return is known when they have run: another dtype, and the product runs eagerly."""
    model = presets.build(name, device="npu", dtype=torch.bfloat16)
    kernelize(model)
    mlp = model.model.layers[0].mlp
    first = "gate_up_proj" if hasattr(mlp, "gate_up_proj") else "gate_proj"
    getattr(mlp, first).register_forward_hook(lambda module, args, output: output.double())
    if first == "gate_proj":
        mlp.up_proj.register_forward_hook(lambda module, args, output: output.double())
    mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    x = tensor(2, 3, 64)
    expected = type(mlp).__mro__[1].forward(mlp, x)
    assert torch.equal(mlp(x), expected)
    unkernelize(model)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_product_and_its_gradient(activation: str, layout: str) -> None:
    """In fp32, where the two GELUs differ by more than rounding."""
    x = tensor(6, 5, 16, dtype=torch.float32)
    x = x.transpose(0, 1) if layout == "columns" else x
    results = []
    for function in (glu.product_of(activation, x.device), lambda x: ACTIVATIONS[activation](x[..., :8]) * x[..., 8:]):
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        results.append((out, *torch.autograd.grad(out, leaf, grad)))
    torch.testing.assert_close(*results)


def test_a_gate_that_spreads_over_what_goes_up() -> None:
    model = kernelize(presets.build("llama", device="npu"))
    mlp, x = model.model.layers[0].mlp, tensor(2, 3, 64, dtype=torch.float32)
    mlp.gate_proj.register_forward_hook(lambda module, args, output: output[..., :1])
    expected = type(mlp).__mro__[1].forward(mlp, x)
    assert torch.equal(mlp(x), expected)
    unkernelize(model)


def test_more_dimensions_than_the_function_takes() -> None:
    model = presets.build("llama", device="npu")
    kernelize(model)
    x = tensor(*[1] * 8, 64, dtype=torch.float32)
    model.model.layers[0].mlp(x)
    row = next(row for row in report(model).rows if row.op == "swiglu" and row.state == "installed")
    assert row.fallbacks == {"more than 8 dimensions": 1}
    unkernelize(model)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_which_half_is_activated_is_found_out(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    published = torch_npu.npu_geglu
    assert glu.geglu_options(activation, torch.device("npu"))["activate_left"] is True

    def the_other_way_round(x: torch.Tensor, *, activate_left: bool, **options: Any) -> Any:
        return published(x, activate_left=not activate_left, **options)

    monkeypatch.setattr(torch_npu, "npu_geglu", the_other_way_round)
    assert glu.geglu_options(activation, torch.device("npu"))["activate_left"] is False
    monkeypatch.setattr(torch_npu, "npu_geglu", lambda x, **options: (x[..., :16], x))
    with pytest.raises(RuntimeError, match=f"computes neither {activation}"):
        glu.geglu_options(activation, torch.device("npu"))


# --- rotations --------------------------------------------------------------------------------------------------------

PLAIN = reference.RotaryVariant(reference.Dialect(), True, ("q", "k", "cos", "sin", "unsqueeze_dim"))
NEIGHBOURS = reference.RotaryVariant(reference.DIALECTS[4], True, PLAIN.parameters)
ONE = reference.RotaryVariant(reference.DIALECTS[8], True, ("x", "cos", "sin", "unsqueeze_dim"))
Q, TABLE = (2, 4, 5, 16), (2, 5, 16)


@pytest.mark.parametrize(
    ("variant", "q", "table", "words"),
    [
        (PLAIN, Q, TABLE, None),
        (PLAIN, Q, (1, 5, 8), None),
        (NEIGHBOURS, Q, (1, 5, 16), None),
        (ONE, Q, (1, 5, 4), None),
        (PLAIN, Q, (2, 5, 32), "wider than the head"),
        (PLAIN, Q, (2, 5, 7), "even number"),
        (ONE, Q, (2, 5, 16), "wider than the head"),
        (PLAIN, (1, 1, 1, 1024), (1, 1, 1024), "below 896"),
        (PLAIN, Q, (3, 5, 16), "another batch"),
        (PLAIN, Q, (2, 4, 16), "don't spread over the heads"),
        (PLAIN, (5, 16), (5, 16), "3 or 4 dimensions"),
        (PLAIN, (1000, 1, 1, 16), (1, 1, 16), "of 1000 or more"),
        (NEIGHBOURS, Q, TABLE, "one table for the whole batch"),
        (NEIGHBOURS, (500, 2, 1, 16), (1, 1, 16), "batch times heads"),
    ],
)
def test_calls_of_a_rotation(variant: Any, q: Any, table: Any, words: str | None) -> None:
    function = rotary.load(None, site(variant))
    tensors = [tensor(*q)] * variant.tensors
    arguments = (*tensors, tensor(*table), tensor(*table))
    reason = function.accepts_call(*arguments)
    assert reason is None if words is None else words in reason
    if words is None:
        expected = reference.build(variant)(*arguments)
        found = function(*arguments)
        pairs = zip(found, expected, strict=True) if variant.tensors == 2 else [(found, expected)]
        exact = reference.build(variant, torch.float64)(*arguments)
        for (ours, theirs), right in zip(pairs, exact if variant.tensors == 2 else [exact], strict=True):
            assert allowed_error_used(ours, theirs, right.double()) <= 1


def test_tables_that_differ_or_learn() -> None:
    function = rotary.load(None, site(PLAIN))
    q, cos = tensor(*Q), tensor(*TABLE)
    assert function.accepts_call(q, q, cos, tensor(2, 5, 8)) == "cos and sin differ in shape"
    assert function.accepts_call(q, q, cos, tensor(*TABLE).requires_grad_()) == "cos or sin needs a gradient"
    assert function.accepts_call(q, q, cos.double(), cos) == "the dtype is none of fp32, bf16, fp16"


@pytest.mark.parametrize("dialect", reference.DIALECTS)
def test_every_dialect_is_within_the_judgement_both_ways(dialect: Any) -> None:
    """Forward and backward, of a table whose halves differ too."""
    variant = reference.RotaryVariant(dialect, True, PLAIN.parameters)
    width = 4 if dialect.table == "half_width" else 8
    tensors = [tensor(2, 4, 5, 16), tensor(2, 2, 5, 16), tensor(1, 5, width), tensor(1, 5, width)]
    results = []
    for function, dtype in (
        (rotary.load(None, site(variant)), torch.bfloat16),
        (reference.build(variant), torch.bfloat16),
        (reference.build(variant, torch.float64), torch.float64),
    ):
        q, k = (t.to(dtype, copy=True).requires_grad_() for t in tensors[:2])
        outputs = function(q, k, *(t.to(dtype) for t in tensors[2:]))
        grads = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o) for o in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, (q, k), grads)])
    for ours, theirs, right in zip(*results, strict=True):
        assert allowed_error_used(ours, theirs, right) <= 1


@pytest.mark.parametrize("dialect", reference.DIALECTS)
def test_in_what_a_dialect_rotates(dialect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulation the result is rounded once anyway; so what the function is given is looked at."""
    import torch_npu

    published, given = torch_npu.npu_rotary_mul, []
    monkeypatch.setattr(
        torch_npu, "npu_rotary_mul", lambda *args, **options: given.append(args[0].dtype) or published(*args, **options)
    )
    width = 4 if dialect.table == "half_width" else 8
    variant = reference.RotaryVariant(dialect, True, PLAIN.parameters)
    rotary.load(None, site(variant))(tensor(2, 4, 5, 16), tensor(2, 2, 5, 16), *[tensor(1, 5, width)] * 2)
    assert given == [torch.float32 if dialect.compute == "fp32" else torch.bfloat16] * 2


def test_the_gradient_of_a_rotation_can_be_differentiated() -> None:
    q = tensor(*Q, dtype=torch.float32).requires_grad_()
    cos, sin = tensor(*TABLE, dtype=torch.float32), tensor(*TABLE, dtype=torch.float32)
    found = []
    for function in (rotary.load(None, site(PLAIN)), reference.build(PLAIN)):
        (gradient,) = torch.autograd.grad(function(q, q, cos, sin)[0].square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), q)[0])
    torch.testing.assert_close(*found)


def test_the_multimodal_function_of_older_versions() -> None:
    """No transformers that is supported has it, so it is verified as a function of a model's own would be."""
    own = Site(None, "rotated", None, "rotated", rotated, torch.device("npu"), torch.bfloat16)
    variant = multimodal_reference.probe(own)
    own = dataclasses.replace(own, variant=variant)
    target = Target("function", "rotated", None, "rotated", rotated)
    kernel = kernel_for(target, rotated, rotary.load_multimodal(None, own))
    assert check_site(own, kernel, "multimodal_rotary") is None
    q, tables = tensor(2, 4, 5, 16), tensor(3, 1, 5, 16)
    assert kernel.accepts_call(q, q, tables, tables, [2, 3, 3]) is None
    assert kernel.accepts_call(q, q, tables.cpu(), tables, [2, 3, 3]) is not None
