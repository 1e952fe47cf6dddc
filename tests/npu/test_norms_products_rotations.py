"""``rms_norm``, ``gated_rms_norm``, ``swiglu``, ``geglu``, ``rotary``: what a call may be, and what is made of it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tests.kernel.test_multimodal_rotary import rotated
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.install import kernel_for
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.glu import npu as glu
from twinkle.kernel.ops.rms_norm import npu as rms_norm
from twinkle.kernel.ops.rms_norm.gated_reference import GatedRMSNormVariant
from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
from twinkle.kernel.ops.rotary import multimodal_reference, reference
from twinkle.kernel.ops.rotary import npu as rotary
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site, Target
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, check_site


def site(variant: Any, module: Any = None, original: Any = None) -> Site:
    device = torch.device("npu")
    return Site(module, "here", type(module), "forward", original, device, torch.bfloat16, variant)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to("npu", dtype)


# --- norms ------------------------------------------------------------------------------------------------------------

LLAMA = RMSNormVariant(0.0, "before", "weight", "variance_epsilon")


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (tensor(2, 3, 8), tensor(8), None),
        (tensor(2, 3, 8), tensor(8, dtype=torch.float32), "different dtypes"),
        (tensor(2, 3, 8, dtype=torch.float64), tensor(8, dtype=torch.float64), "none of fp32, bf16, fp16"),
        (torch.randn(2, 8), torch.randn(8), "not on an NPU"),
        (tensor(2, 8), torch.randn(8).bfloat16(), "on different devices"),
        (tensor(8), tensor(8), "2 to 8 dimensions"),
        (tensor(2, 16), tensor(8), "isn't as wide"),
        (tensor(0, 8), tensor(8), "empty"),
    ],
)
def test_calls_of_a_norm(x: torch.Tensor, weight: torch.Tensor, words: str | None) -> None:
    norm = LlamaRMSNorm(8)
    norm.weight = torch.nn.Parameter(weight)
    reason = rms_norm.load(None, site(LLAMA, norm)).accepts_call(norm, x)
    assert reason is None if words is None else words in reason


def test_a_tensor_subclass_and_a_compiler_are_left_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.Tensor):
        pass

    norm = LlamaRMSNorm(8).to("npu", torch.bfloat16)
    layer = rms_norm.load(None, site(LLAMA, norm))
    assert layer.accepts_call(norm, tensor(2, 8).as_subclass(Own)) == "a tensor subclass"
    model = presets.build("llama", device="npu")
    expected = model(**presets.inputs(model, device="npu")).logits
    kernelize(model)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager")(**presets.inputs(model, device="npu")).logits
    assert torch.equal(found, expected), "the original's very operators"
    unkernelize(model)
    monkeypatch.setattr(npu_support, "is_compiling", lambda: True)  # while Dynamo traces, no line of Python runs
    assert "inside a compiler" in layer.accepts_call(norm, tensor(2, 8))


def test_gates_that_it_does_not_take() -> None:
    norm = Qwen3NextRMSNormGated(8).to("npu", torch.bfloat16)
    layer = rms_norm.load_gated(None, site(GatedRMSNormVariant("weight", "variance_epsilon"), norm))
    x = tensor(3, 8)
    assert layer.accepts_call(norm, x, tensor(3, 8, dtype=torch.float64)) == "the dtype is none of fp32, bf16, fp16"
    assert layer.accepts_call(norm, x, x.cpu()) == "the tensors are not on an NPU"
    assert layer.accepts_call(norm, x, tensor(3, 8, dtype=torch.float32)) is None


@pytest.mark.parametrize("gate", [None, 8, 4])
def test_calls_of_a_gated_norm(gate: int | None) -> None:
    norm = Qwen3NextRMSNormGated(8).to("npu", torch.bfloat16)
    layer = rms_norm.load_gated(None, site(GatedRMSNormVariant("weight", "variance_epsilon"), norm))
    x, given = tensor(30, 8), None if gate is None else tensor(30, gate)
    assert layer.accepts_call(norm, x, given) == ("the gate's shape is not the input's" if gate == 4 else None)
    if gate == 8:  # in fp32, as the original's; rounded to bf16 before the product it would be within the judgement
        normed, exact = layer.forward(norm, x).float(), torch.nn.functional.silu(given.float())
        assert torch.equal(layer.forward(norm, x, given), (normed * exact).bfloat16())
    if gate is None:
        expected = LlamaRMSNorm.forward(norm, x)
        assert allowed_error_used(layer.forward(norm, x), expected, expected.double()) <= 1


@pytest.mark.parametrize(
    "norm", [LlamaRMSNorm(64), GemmaRMSNorm(64), Gemma4RMSNorm(64), Gemma4RMSNorm(64, with_scale=False)]
)
def test_the_switch_makes_norms_compute_in_fp32(
    norm: Any, monkeypatch: pytest.MonkeyPatch, called: Counter[str]
) -> None:
    """Read at each call; closer to the truth, in the input's dtype still; and "0", "false", "off" are off."""
    model = torch.nn.Sequential(norm).to("npu", torch.bfloat16)
    if hasattr(norm, "weight"):
        norm.weight.data += 0.02 * torch.randn(64).to(norm.weight)
    x = tensor(50, 64).requires_grad_()
    exact = copy.deepcopy(norm).double()(x.double())
    kernelize(model, {type(norm): KernelChoice("rms_norm", ("npu",))}, strict=True, device="npu")
    results = {}
    for value in ("1", "true", "ON", "0", "False", "off", ""):
        monkeypatch.setenv(rms_norm.IN_FP32, value)
        results[value] = model(x)
    monkeypatch.delenv(rms_norm.IN_FP32)
    plain = model(x)
    assert plain.dtype == torch.bfloat16
    assert all(torch.equal(results[value], plain) for value in ("0", "False", "off", ""))
    ulp = torch.finfo(torch.bfloat16).eps
    for value in ("1", "true", "ON"):
        assert ((results[value] - exact).abs() <= 0.51 * ulp * exact.abs()).all(), "rounded once"
    results["1"].sum().backward()
    assert x.grad is not None and called["npu_rms_norm_backward"] == 1
    unkernelize(model)


@pytest.mark.parametrize(
    ("norm", "op", "function"),
    [
        (LlamaRMSNorm(64), "rms_norm", "npu_rms_norm"),
        (GemmaRMSNorm(64), "rms_norm", "npu_gemma_rms_norm"),
        (Qwen3NextRMSNormGated(64), "gated_rms_norm", "npu_rms_norm"),
    ],
)
def test_the_switch_decides_in_what_torch_npu_computes(
    norm: Any, op: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulation both round once; so what the functions are given is looked at."""
    import torch_npu

    published, given = getattr(torch_npu, function), []

    def recorded(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        given.append((x.dtype, weight.dtype))
        return published(x, weight, **options)

    model = torch.nn.Sequential(norm).to("npu", torch.bfloat16)
    target = type(norm) if op == "rms_norm" else f"{type(norm).__module__}.{type(norm).__qualname__}.forward"
    kernelize(model, {target: KernelChoice(op, ("npu",))}, strict=True)
    monkeypatch.setattr(torch_npu, function, recorded)
    inputs = [tensor(5, 64)] * (2 if op == "gated_rms_norm" else 1)
    for value, dtype in (("1", torch.float32), ("off", torch.bfloat16), ("yes", torch.float32), ("0", torch.bfloat16)):
        monkeypatch.setenv(rms_norm.IN_FP32, value)
        assert norm(*inputs).dtype == torch.bfloat16 and given.pop() == (dtype, dtype)
    unkernelize(model)


def test_a_small_weight_beside_one_is_not_lost(called: Counter[str]) -> None:
    """1 + w in bf16 loses what is below 2**-8."""
    norm = GemmaRMSNorm(64).to("npu", torch.bfloat16)
    norm.weight.data.copy_(torch.linspace(-0.003, 0.003, 64))
    x = tensor(50, 64)
    exact = copy.deepcopy(norm).double()(x.double())
    model = kernelize(torch.nn.Sequential(norm), {GemmaRMSNorm: KernelChoice("rms_norm", ("npu",))}, strict=True)
    assert ((model(x) - exact).abs() <= 0.51 * torch.finfo(torch.bfloat16).eps * exact.abs()).all()
    assert called["npu_gemma_rms_norm"] == 1
    unkernelize(model)


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
