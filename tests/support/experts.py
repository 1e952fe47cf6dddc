"""Inputs for experts of every variant, and the judgement of what a kernel makes of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.triton_device import DEVICE
from twinkle import presets
from twinkle.commands.comparison import judge
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.moe.experts_reference import Gate, MoeExpertsVariant, moe_experts
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used

FAMILIES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "qwen3_next": "Qwen3NextExperts",
    "qwen3_vl_moe": "Qwen3VLMoeTextExperts",
    "qwen3_5_moe": "Qwen3_5MoeExperts",
    "glm4_moe": "Glm4MoeExperts",
    "gemma4": "Gemma4TextExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "deepseek_v4": "DeepseekV4Experts",
    "gpt_oss": "GptOssExperts",
}
"""Families -> their class of experts with stacked weights."""

gates = st.sampled_from(
    [Gate("silu"), Gate("gelu"), Gate("gelu_tanh"), Gate("silu", 0.8), Gate("silu", 0.7, 1.702, 1.0)]
)
variants = st.builds(MoeExpertsVariant, gates, st.booleans(), st.booleans(), st.booleans())


def made(
    variant: MoeExpertsVariant, sizes: tuple[int, ...], dtype: torch.dtype, seed: int, strangers: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Differentiable inputs by name, and the chosen experts."""
    tokens, hidden, width, experts, top_k = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
    if variant.transposed:
        shapes = {name: (experts, shape[2], shape[1]) for name, shape in shapes.items()}
    shapes |= {"x": (tokens, hidden), "weights": (tokens, top_k)}
    if variant.bias:
        shapes |= {"gate_up_bias": (experts, 2 * width), "down_bias": (experts, hidden)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("gate_up", "down"):
        inputs[name] /= hidden**0.5
    inputs["weights"] = inputs["weights"].abs()
    index = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    if experts > top_k:
        index[index == experts - 1] = 0  # an expert without tokens; a token may have chosen another one twice then
    if strangers:
        index[::3, 0] = experts
        index[1::4, -1] = -1
    return {name: t.to(DEVICE, dtype) for name, t in inputs.items()}, index.to(DEVICE)


def results(
    function: Any,
    inputs: dict[str, torch.Tensor],
    index: torch.Tensor,
    variant: MoeExpertsVariant,
    dtype: torch.dtype,
    grad: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The output and every input's gradient."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    stacks = tuple(leaves.get(name) for name in ("gate_up", "down", "gate_up_bias", "down_bias"))
    out = function(leaves["x"], index, leaves["weights"], stacks, variant)
    grad = _gradient_of(out) if grad is None else grad
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out))
    return {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def _gradient_of(out: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)


class Order:
    """Tokens and hidden channels in another order: the same numbers, summed differently."""

    def __init__(self, number: int, tokens: int, hidden: int, variant: MoeExpertsVariant) -> None:
        generator = torch.Generator().manual_seed(number)
        rows, channels = (
            torch.randperm(size, generator=generator) if number else torch.arange(size) for size in (tokens, hidden)
        )
        inwards, outwards = (1, 2) if variant.transposed else (2, 1)
        self.orders = {
            "x": {0: rows, 1: channels},
            "output": {0: rows, 1: channels},
            "weights": {0: rows},
            "gate_up": {inwards: channels},
            "down": {outwards: channels},
            "gate_up_bias": {},
            "down_bias": {1: channels},
        }

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for dim, order in self.orders[name].items():
            tensor = tensor.index_select(dim, order.to(tensor.device))
        return tensor

    def back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for dim, order in self.orders[name].items():
            tensor = tensor.index_select(dim, order.argsort().to(tensor.device))
        return tensor


def assert_within_the_judgement(
    found: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    index: torch.Tensor,
    variant: MoeExpertsVariant,
    dtype: torch.dtype,
) -> None:
    """Judged by the original in three orders of summation, of which the one that allows most counts.

    A gradient may have a handful of elements here, and how near one order comes to them is luck.
    """
    exact = results(moe_experts, inputs, index, variant, torch.float64)
    originals = []
    for number in range(3):
        order = Order(number, *inputs["x"].shape, variant)
        grad = order.of("output", _gradient_of(found["output"]))
        ordered = {name: order.of(name, tensor) for name, tensor in inputs.items()}
        theirs = results(moe_experts, ordered, order.of("weights", index), variant, dtype, grad)
        originals.append({name: order.back(name, tensor) for name, tensor in theirs.items()})
    used = {name: min(allowed_error_used(found[name], one[name], exact[name]) for one in originals) for name in exact}
    assert max(used.values()) <= 1, used


def assert_only_wanted_gradients(function: Any, sizes: tuple[int, ...], frozen: tuple[str, ...]) -> None:
    """Those that are computed are the same as when all are."""
    variant = MoeExpertsVariant(Gate("silu"))
    inputs, index = made(variant, sizes, torch.float32, 0, False)
    leaves = {name: tensor.requires_grad_(name not in frozen) for name, tensor in inputs.items()}
    expected = results(function, inputs, index, variant, torch.float32)
    out = function(leaves["x"], index, leaves["weights"], (leaves["gate_up"], leaves["down"], None, None), variant)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out))
    for name, leaf in leaves.items():
        assert leaf.grad is None if name in frozen else torch.equal(leaf.grad, expected[name]), name


# --- whole models -----------------------------------------------------------------------------------------------------


def mapping(model: torch.nn.Module, family: str, backend: str) -> dict[str, KernelChoice]:
    """A family's experts by one backend."""
    return {f"{type(model).__module__}.{FAMILIES[family]}.forward": KernelChoice("moe_experts", (backend,))}


def assert_serves_a_family(family: str, backend: str) -> None:
    """Verified one by one, and in the model: outputs and the gradient of every parameter."""
    original = presets.build(family).to(DEVICE)
    model = kernelize(copy.deepcopy(original), mapping(original, family, backend), verify=True, strict=True)
    used = judge(original, model)
    (row,) = report(model).rows
    assert (short(row.target), row.state, row.verified) == (f"{family}.{FAMILIES[family]}.forward", "installed", True)
    assert row.calls > 0 and row.fallbacks == {}
    assert used and max(used.values()) <= 1, {key: value for key, value in used.items() if value > 1}
    unkernelize(model)


def assert_leaves_some_calls_to_the_original(backend: str) -> None:
    """Those without tokens, and those for which autocast has a dtype of its own."""
    model = presets.build("qwen3_moe").to(DEVICE)
    kernelize(model, mapping(model, "qwen3_moe", backend))
    experts = next(module for module in model.modules() if type(module).__name__ == FAMILIES["qwen3_moe"])
    hidden = experts.gate_up_proj.shape[2]
    x, weights = torch.randn(3, hidden, device=DEVICE), torch.ones(3, 2, device=DEVICE)
    index = torch.zeros(3, 2, dtype=torch.long, device=DEVICE)
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, hidden)
    with torch.autocast(DEVICE, torch.bfloat16):
        experts(x, index, weights)
    (row,) = report(model).rows
    assert set(row.fallbacks) == {"an empty tensor", "autocast would make the original multiply in another dtype"}
    unkernelize(model)
