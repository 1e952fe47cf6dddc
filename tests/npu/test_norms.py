"""``rms_norm`` and ``gated_rms_norm``: what a call may be, what is made of it, and the switch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tests.support.npu_inputs import site, tensor
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.rms_norm import npu as rms_norm
from twinkle.kernel.ops.rms_norm.gated_reference import GatedRMSNormVariant
from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used

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
    seen = []
    torch.func.vmap(lambda x: seen.append(npu_support.call_reason(x)) or x)(torch.ones(2, 8, device="npu"))
    assert seen == ["inside a functorch transform"]
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
