"""``moe_experts`` and ``moe_block``: every layout, gate and choice, both ways; which calls, and what isn't kept."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("transformers")

from tests.support.experts import assert_within_the_judgement, made, results, variants
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.moe import npu
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant, moe_experts
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site
from twinkle.kernel.undo import unkernelize

SIZES = [(13, 24, 16, 5, 2), (1, 8, 8, 2, 1), (7, 16, 40, 3, 3), (40, 16, 16, 9, 8), (6, 16, 8, 4, 2)]
"""Tokens, hidden size, intermediate size, experts, chosen; in the last one a gate and an up are as wide as the input,
which no shape tells apart."""

SILU = MoeExpertsVariant(Gate("silu"))


def on_npu(*arguments: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs, index = made(*arguments)
    return {name: tensor.to("npu") for name, tensor in inputs.items()}, index.to("npu")


@settings(max_examples=40)
@given(
    variant=variants.map(lambda variant: dataclasses.replace(variant, bias=False)),
    sizes=st.sampled_from(SIZES),
    seed=st.integers(0, 100),
    strangers=st.booleans(),
)
def test_output_and_gradients_are_within_the_judgement(
    variant: MoeExpertsVariant, sizes: tuple[int, ...], seed: int, strangers: bool
) -> None:
    inputs, index = on_npu(variant, sizes, torch.bfloat16, seed, strangers)
    found = results(npu.grouped_experts, inputs, index, variant, torch.bfloat16)
    cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    found = {name: tensor.cpu() for name, tensor in found.items()}
    assert_within_the_judgement(found, cpu, index.cpu(), variant, torch.bfloat16)


@pytest.mark.parametrize("frozen", [("gate_up", "down"), ("x", "gate_up"), ("weights", "down"), ("x", "weights")])
def test_only_the_gradients_that_are_wanted(frozen: tuple[str, ...], called: Counter[str]) -> None:
    inputs, index = on_npu(SILU, SIZES[0], torch.bfloat16, 0, False)
    expected = results(npu.grouped_experts, inputs, index, SILU, torch.bfloat16)
    called.clear()
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in inputs.items()}
    stacks = leaves["gate_up"], leaves["down"], None, None
    out = npu.grouped_experts(leaves["x"], index, leaves["weights"], stacks, SILU)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out))
    for name, leaf in leaves.items():
        assert leaf.grad is None if name in frozen else torch.equal(leaf.grad, expected[name]), name
    forward, of_stacks = 2, sum(name not in frozen for name in ("gate_up", "down"))
    of_rows = 2 if "gate_up" not in frozen or "x" not in frozen else 1
    assert called["npu_grouped_matmul"] <= forward + of_stacks + of_rows
    if not of_stacks:
        assert called["npu_grouped_matmul"] == forward + of_rows, "frozen stacks cost nothing"


def test_an_experts_gradient_without_rows_is_zero() -> None:
    inputs, _ = on_npu(SILU, SIZES[0], torch.bfloat16, 0, False)
    index = torch.zeros(13, 2, dtype=torch.int64, device="npu")
    found = results(npu.grouped_experts, inputs, index, SILU, torch.bfloat16)
    assert all(not found[name][1:].any() and found[name][0].any() for name in ("gate_up", "down"))


def layer(variant: MoeExpertsVariant = SILU, device: str = "npu") -> Any:
    module = nn.Module()
    return npu.load(None, Site(module, "", nn.Module, "forward", None, torch.device(device), torch.bfloat16, variant))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, i, w, m: (x, i, w), None),
        (lambda x, i, w, m: (x, i.int(), w.float()), None),
        (lambda x, i, w, m: (x, i.short(), w), "neither int64 nor int32"),
        (lambda x, i, w, m: (x[None], i, w), "tokens of [tokens, hidden size]"),
        (lambda x, i, w, m: (x.cpu(), i, w), "not on an NPU"),
        (lambda x, i, w, m: (x.float(), i, w), "different dtypes"),
        (lambda x, i, w, m: (x[:0], i[:0], w[:0]), "empty"),
        (lambda x, i, w, m: (x[:1], i[:1].repeat(1, 257), w[:1].repeat(1, 257)), "more choices"),
    ],
)
def test_calls(change: Any, words: str | None) -> None:
    inputs, index = on_npu(SILU, SIZES[0], torch.bfloat16, 0, False)
    module: Any = nn.Module()
    module.gate_up_proj, module.down_proj = inputs["gate_up"], inputs["down"]
    reason = layer().accepts_call(module, *change(inputs["x"], index, inputs["weights"], module))
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ((3, 8, 8, 1, 1), torch.bfloat16, "one expert"),
        ((3, 8, 32768, 2, 1), torch.bfloat16, "65536 columns"),
        ((3, 8, 8, 2, 1), torch.float32, "of bf16 only"),
    ],
)
def test_stacks(sizes: tuple[int, ...], dtype: torch.dtype, words: str) -> None:
    inputs, index = on_npu(SILU, sizes, dtype, 0, False)
    module: Any = nn.Module()
    module.gate_up_proj, module.down_proj = inputs["gate_up"], inputs["down"]
    assert words in layer().accepts_call(module, inputs["x"], index, inputs["weights"])


def test_biases_are_refused() -> None:
    model = presets.build("gpt_oss", device="npu", dtype=torch.bfloat16)
    target = f"{type(model).__module__}.GptOssExperts.forward"
    kernelize(model, {target: KernelChoice("moe_experts", ("npu",))})
    (row,) = report(model).rows
    assert row.state == "refused" and "the experts have biases" in row.why()


class Doubled(nn.Module):
    """An adapter: the weights are new tensors at each access."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device="npu"))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale.to(weight)


def test_adapted_weights_are_read_anew_in_evaluation() -> None:
    """A cache of transposed weights, by their version, would serve old ones: fresh tensors all have version 0."""
    model = presets.build("qwen3_moe", device="npu", dtype=torch.bfloat16)
    kernelize(model)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(experts, name, Doubled())
    x, index = torch.randn(5, 64).to("npu", torch.bfloat16), torch.arange(10, device="npu").view(5, 2) % 8
    weights = torch.rand(5, 2).to("npu", torch.bfloat16)
    with torch.no_grad():
        before = npu.grouped_experts(x, index, weights, (experts.gate_up_proj, experts.down_proj, None, None), SILU)
        experts.parametrizations.down_proj[0].scale.fill_(3.0)
        stacks = experts.gate_up_proj, experts.down_proj, None, None
        after = npu.grouped_experts(x, index, weights, stacks, SILU)
        expected = moe_experts(x, index, weights, stacks, SILU)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected, rtol=2e-2, atol=2e-2)


def test_what_the_configuration_asks_for_since_is_served_by_the_original() -> None:
    model = presets.build("qwen3_moe", device="npu", dtype=torch.bfloat16)
    kernelize(model)
    model.set_experts_implementation("eager")
    model(**presets.inputs(model, device="npu"))
    row = next(row for row in report(model).rows if row.op == "moe_experts" and row.state == "installed")
    assert row.calls == 0 and "implementation 'eager' now" in next(iter(row.fallbacks))
    unkernelize(model)


def addcmuls(run: Any) -> int:
    """How often torch_npu's ``addcmul`` is called meanwhile."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(event.count for event in found.key_averages() if event.key == "aten::addcmul")


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_a_shared_expert_is_added_in_one_pass(name: str) -> None:
    """The block calls its children; hooks on the router see it."""
    model = presets.build(name, device="npu", dtype=torch.bfloat16)
    block = next(module for module in model.modules() if type(module).__name__.endswith("SparseMoeBlock"))
    x = torch.randn(2, 3, 64).to("npu", torch.bfloat16)
    seen: list[Any] = []
    block.gate.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = block(x)
    assert addcmuls(lambda: block(x)) == 0
    kernelize(model)
    torch.testing.assert_close(block(x), expected, rtol=2e-2, atol=2e-2)
    assert addcmuls(lambda: block(x)) > 0 and len(seen) == 4
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_a_block_without_a_shared_expert_has_nothing_to_fuse(name: str) -> None:
    """A row that says npu is a kernel's; the experts have a row of their own."""
    model = kernelize(presets.build(name, device="npu", dtype=torch.bfloat16))
    rows = {row.op: row for row in report(model).rows if row.state != "unused"}
    assert (rows["moe_block"].state, rows["moe_block"].backend) == ("refused", None)
    assert "without a shared expert" in rows["moe_block"].why() and rows["moe_experts"].backend == "npu"
    unkernelize(model)
