"""What Liger's backends leave to the original: calls outside a kernel's domain, and sites that no kernel fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import passed_children
from tests.support.liger_sites import CASES, PATH, load, make, site_of
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.moe.experts_reference import Gate
from twinkle.kernel.registry import get_impl, get_op
from twinkle.kernel.report import Row, report
from twinkle.kernel.targets import ModelIndex, resolve_target
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used

pytestmark = pytest.mark.liger

# --- call by call: what is outside the kernel's domain goes to the original -------------------------------------------


def kernelized(module: nn.Module, op: str) -> tuple[nn.Module, Row]:
    kernelize(module, {type(module): KernelChoice(op, ("liger",))}, strict=True)
    (row,) = report(module).rows
    return module, row


CALLS: dict[str, tuple[Any, str]] = {
    "an fp32 weight promotes the original's result": (lambda: torch.randn(2, 32, dtype=torch.bfloat16), "dtypes"),
    "fp64": (lambda: torch.randn(2, 32, dtype=torch.float64), "fp32, bf16, fp16"),
    "no rows": (lambda: torch.randn(0, 32), "empty"),
    "a subclass": (lambda: torch.randn(2, 32).as_subclass(_Subclass), "subclass"),
    "negated": (lambda: torch._neg_view(torch.randn(2, 32)), "negated"),
}


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(("make_input", "reason"), CALLS.values(), ids=CALLS)
def test_a_call_outside_the_domain_runs_the_original(make_input: Any, reason: str) -> None:
    original = make("llama", "LlamaRMSNorm")
    module, row = kernelized(make("llama", "LlamaRMSNorm"), "rms_norm")
    x = make_input()
    expected, result = original(x), module(x)
    assert type(result) is type(expected)
    assert result.dtype == expected.dtype and torch.equal(result, expected)
    assert (row.calls, [reason in text for text in row.fallbacks]) == (0, [True])
    module(torch.randn(2, 32))
    assert row.calls == 1


def test_a_model_that_moved_to_another_device_runs_the_original() -> None:
    module, row = kernelized(make("llama", "LlamaRMSNorm"), "rms_norm")
    result = module.to("meta")(torch.randn(2, 32, device="meta"))
    assert (result.is_meta, row.calls) == (True, 0)
    assert list(row.fallbacks) == ["the tensors are on a device that Liger's kernels don't run on"]


def test_rows_that_liger_would_raise_for_run_the_original() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module, row = kernelized(LlamaRMSNorm(65537), "rms_norm")
    x = torch.randn(1, 65537)
    assert torch.equal(module(x), LlamaRMSNorm(65537)(x))
    assert list(row.fallbacks) == ["rows wider than 65536"]


def test_where_all_is_computed_in_fp32_the_weight_may_be_wider() -> None:
    original = make("gemma", "GemmaRMSNorm")
    module, row = kernelized(make("gemma", "GemmaRMSNorm"), "rms_norm")
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    result, expected = module(x), original(x)
    assert (row.calls, row.fallbacks, result.dtype) == (1, {}, torch.bfloat16)
    assert allowed_error_used(result, expected, original.double()(x.double())) <= 1


def test_torch_func_transforms_run_the_original() -> None:
    module, row = kernelized(make("llama", "LlamaRMSNorm"), "rms_norm")
    x = torch.randn(3, 32)
    batched = torch.func.vmap(module)(x)
    assert list(row.fallbacks) == ["inside a functorch transform"]
    torch.testing.assert_close(batched, make("llama", "LlamaRMSNorm")(x))


def test_projections_of_different_dtypes_are_multiplied_as_the_original_does() -> None:
    module, row = kernelized(make("qwen3", "Qwen3MLP"), "swiglu")
    original = make("qwen3", "Qwen3MLP")
    for mlp in (module, original):
        mlp.up_proj.register_forward_hook(lambda m, args, out: out.double())
        mlp.down_proj.double()
    x = torch.randn(3, 32)
    assert torch.equal(module(x), original(x))


def test_under_autocast_the_projections_decide_the_dtype() -> None:
    module, row = kernelized(make("qwen3", "Qwen3MLP"), "swiglu")
    original = make("qwen3", "Qwen3MLP")
    x = torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = module(x), original(x)
    assert (result.dtype, row.calls) == (torch.bfloat16, 1)
    assert allowed_error_used(result, expected, original.double()(x.double())) <= 1


@pytest.mark.parametrize("op", ("rms_norm", "swiglu"))
def test_a_compiler_traces_the_original(op: str) -> None:
    """What is around Liger's kernels doesn't trace into one graph: a compiled model runs the original, unbroken."""
    family, name = {"rms_norm": ("llama", "LlamaRMSNorm"), "swiglu": ("qwen3", "Qwen3MLP")}[op]
    module, row = kernelized(make(family, name), op)
    x = torch.randn(3, 32)
    compiled, expected = (torch.compile(m, fullgraph=True, backend="aot_eager") for m in (module, make(family, name)))
    assert torch.equal(compiled(x), expected(x))
    assert (row.calls, row.counts.compiled) == (0, True)
    module(x)
    assert row.calls == 1


@pytest.mark.parametrize("case", [name for name in CASES if name != "experts"])
def test_a_negated_gradient(case: str) -> None:
    op, family, name = CASES[case]
    if op == "rotary":
        arguments = _rotary_arguments()
        leaves = [arguments[each].requires_grad_() for each in ("q", "k")]
        outputs = load(op, site_of(op, family, name))(**arguments)
    else:
        module, row = kernelized(make(family, name.partition(".")[0]), op)
        leaves = [torch.randn(2, 3, 32, requires_grad=True), *module.parameters()]
        outputs = (module(leaves[0]),)
        assert row.calls == 1
    seeds = [torch.randn_like(out) for out in outputs]
    expected = torch.autograd.grad(outputs, leaves, seeds, retain_graph=True)
    negated = [torch._neg_view(-seed) for seed in seeds]
    torch.testing.assert_close(torch.autograd.grad(outputs, leaves, negated), expected)


# --- rotary -----------------------------------------------------------------------------------------------------------


def _rotary_arguments(**changes: Any) -> dict[str, Any]:
    angles = torch.rand(2, 5, 8)
    tables = torch.cat((angles, angles), -1)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    return {"q": q, "k": k, "cos": tables.cos(), "sin": tables.sin(), **changes}


ROTARY_CALLS: dict[str, tuple[dict[str, Any], str | None]] = {
    "one table for the batch": ({"cos": torch.ones(1, 5, 16), "sin": torch.zeros(1, 5, 16)}, None),
    "half of the head": ({"cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)}, None),
    "halves that differ": ({"cos": torch.randn(2, 5, 16)}, "halves"),
    "heads before the sequence": (
        {"q": torch.randn(2, 5, 4, 16), "k": torch.randn(2, 5, 2, 16), "unsqueeze_dim": 2},
        "[batch, heads, sequence, channels]",
    ),
    "wider tables": ({"q": torch.randn(2, 4, 5, 16).bfloat16(), "k": torch.randn(2, 2, 5, 16).bfloat16()}, "dtypes"),
    "tables with a gradient": ({"cos": torch.ones(2, 5, 16, requires_grad=True)}, "gradient"),
    "a key of another dtype": ({"k": torch.randn(2, 2, 5, 16).bfloat16()}, "dtypes"),
}


def test_a_compiler_traces_the_original_rotary_and_experts() -> None:
    """As the two above, for a function and for a kernel that reads a count back to the host."""
    rotary, experts = site_of(*CASES["rotary"]), site_of(*CASES["experts"])
    turn, compute = load("rotary", rotary), load("moe_experts", experts)
    example = get_op("moe_experts").load_reference().example(experts, experts.variant)
    arguments = _rotary_arguments()
    reasons: list[str | None] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        reasons.append(turn.accepts_call(**arguments))
        reasons.append(compute.accepts_call(example.module, *example.args))
        return x + 1

    torch.compile(ask, fullgraph=True, backend="aot_eager")(torch.ones(1))
    assert set(reasons) == {"inside a compiler, which fuses the original"}


@pytest.mark.parametrize(("changes", "reason"), ROTARY_CALLS.values(), ids=ROTARY_CALLS)
def test_rotary_call_by_call(changes: dict[str, Any], reason: str | None) -> None:
    site = site_of("rotary", "phi3", "apply_rotary_pos_emb")
    rotary = load("rotary", site)
    arguments = _rotary_arguments(**changes)
    refused = rotary.accepts_call(**arguments)
    if reason is not None:
        assert refused is not None and reason in refused
        return
    assert refused is None
    for result, expected in zip(rotary(**arguments), site.original(**arguments), strict=True):
        torch.testing.assert_close(result, expected)


def test_rotary_where_the_result_is_cast_back_takes_fp32_tables() -> None:
    site = site_of("rotary", "olmo2", "apply_rotary_pos_emb")
    rotary = load("rotary", site)
    arguments = _rotary_arguments()
    arguments |= {name: arguments[name].bfloat16() for name in ("q", "k")}
    assert rotary.accepts_call(**arguments) is None
    exact = site.original(**{name: value.double() for name, value in arguments.items()})
    for result, expected, judge in zip(rotary(**arguments), site.original(**arguments), exact, strict=True):
        assert allowed_error_used(result, expected, judge) <= 1
    arguments |= {name: arguments[name].bfloat16() for name in ("cos", "sin")}
    arguments |= {name: arguments[name].float() for name in ("q", "k")}
    assert "dtypes" in rotary.accepts_call(**arguments)  # Liger would compute in the tables' bf16


def test_rotary_of_a_liger_without_rotary_dim_takes_whole_heads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import liger_kernel.ops as ops

    class Older(ops.LigerRopeFunction):
        @staticmethod
        def forward(
            ctx: Any, q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: Any = 1
        ) -> Any:
            raise AssertionError("not called here")

    monkeypatch.setattr(ops, "LigerRopeFunction", Older)
    rotary = load("rotary", site_of("rotary", "phi3", "apply_rotary_pos_emb"))
    half = {"cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)}
    assert rotary.accepts_call(**_rotary_arguments(**half)) == "cos and sin are not as wide as the head"
    assert rotary.accepts_call(**_rotary_arguments()) is None


# --- experts ----------------------------------------------------------------------------------------------------------


def test_a_slot_without_an_expert_adds_nothing_and_gets_no_gradient() -> None:
    """Under expert parallelism an index may be ``num_experts``; unhandled, Liger writes out of bounds for it."""
    site = site_of(*CASES["experts"])
    reference = get_op("moe_experts").load_reference()
    loaded = load("moe_experts", site)
    example = reference.example(site, site.variant)
    x, index, weights = (a.clone() for a in example.args)
    index[::3, 1] = reference.EXPERTS
    index[1, 0] = -1
    results = []
    for function in (loaded.forward, reference.build(site.variant).forward):
        tokens, shares = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = function(example.module, tokens, index, shares)
        results.append((out, *torch.autograd.grad(out.square().sum(), (tokens, shares))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (results[0][2][index == reference.EXPERTS] == 0).all()
    assert int(index.max()) == reference.EXPERTS, "the caller's indices were changed"


def test_experts_call_by_call() -> None:
    site = site_of(*CASES["experts"])
    loaded = load("moe_experts", site)
    example = get_op("moe_experts").load_reference().example(site, site.variant)
    module, (x, index, weights) = example.module, example.args
    refused = {
        "router weights in fp32": loaded.accepts_call(module.to(torch.bfloat16), x.bfloat16(), index, weights),
        "three dimensions": loaded.accepts_call(module.float(), x[None], index, weights),
    }
    with torch.autocast("cpu", torch.bfloat16):
        refused["autocast"] = loaded.accepts_call(module, x, index, weights)
    assert [key for key, reason in refused.items() if reason is None] == []
    assert loaded.accepts_call(module, x, index, weights) is None


# --- what is refused before anything is installed ---------------------------------------------------------------------

REFUSED = {
    "interleaved rotary": ("rotary", "glm4", "apply_rotary_pos_emb", "pairing=interleaved"),
    "rotary of one tensor": ("rotary", "gemma4", "apply_rotary_pos_emb", "x, cos, sin"),
    "rotary without unsqueeze": ("rotary", "qwen2_vl", "apply_rotary_pos_emb_vision", "compute=fp32"),
    "half-width tables": ("rotary", "gpt_oss", "apply_rotary_pos_emb", "table=half_width"),
}


@pytest.mark.parametrize(("op", "family", "name", "why"), REFUSED.values(), ids=REFUSED)
def test_refused_rotaries(op: str, family: str, name: str, why: str) -> None:
    reason = get_impl(op, "liger").accepts(site_of(op, family, name))
    assert why in str(reason)


def test_refused_activations_and_widths() -> None:
    exact = make("gemma", "GemmaMLP")
    exact.act_fn = nn.GELU()
    (site,) = ModelIndex.of(exact, None).sites(resolve_target(PATH.format("gemma", "GemmaMLP.forward")))
    site = dataclasses.replace(site, variant=get_op("geglu").load_reference().probe(site))
    accepts = get_impl("geglu", "liger").accepts
    assert str(accepts(site)) == "the activation is gelu, Liger has silu and gelu_tanh"

    wide = site_of(*CASES["swiglu, fused projection"])
    for fused_width, refused in ((2 * 65536, False), (2 * 65536 + 2, True)):
        wide.module.gate_up_proj.out_features = fused_width
        assert (accepts(wide) is not None) is refused

    experts = site_of(*CASES["experts"])
    accepts = get_impl("moe_experts", "liger").accepts
    other = dataclasses.replace(experts, variant=dataclasses.replace(experts.variant, gate=Gate("gelu_tanh")))
    assert "Liger's experts have silu" in str(accepts(other))
    for change in ({"transposed": True}, {"interleaved": True}, {"bias": True}, {"gate": Gate("silu", 7.0)}):
        other = dataclasses.replace(experts, variant=dataclasses.replace(experts.variant, **change))
        assert "no clamped gate, no biases" in str(accepts(other))


def test_a_model_without_values_is_refused_unless_its_device_is_said() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        norm = LlamaRMSNorm(32)
    mapping = {LlamaRMSNorm: KernelChoice("rms_norm", ("liger",))}
    kernelize(norm, mapping)
    (row,) = report(norm).rows
    assert row.state == "refused" and "meta" in row.why() and "device=" in row.why()
    kernelize(norm, mapping, device="cpu")
    assert [row.state for row in report(norm).rows] == ["installed"]
    unkernelize(norm)
    assert type(norm) is LlamaRMSNorm


@pytest.mark.parametrize("case", passed_children.CASES)
@pytest.mark.parametrize("change", passed_children.CHANGES, ids=lambda change: change.__name__)
def test_an_activation_that_the_kernel_goes_past(case: str, change: passed_children.Change) -> None:
    passed_children.assert_seen(case, "liger", change, before=True)
