"""The op ``fla``: gated delta-nets by the formula and by PyTorch; installed, packed, undone."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from tests.support.linear_attention import inputs, linear_model, second_document, with_gradients
from tests.support.models import clean_process  # noqa: F401
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.fla import reference
from twinkle.kernel.registry import get_op
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, compare_models

ROOT = Path(__file__).parents[2]
TORCH = {"fla": KernelChoice("fla", ("torch",))}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("form", [reference.chunked, reference.recurrent])
def test_both_forms_are_within_the_judgement(form: Any, length: int) -> None:
    """Output, state and gradients, of transformers' own function; judged by the recurrence in fp64."""
    tensors, state = inputs(length, batch=2), torch.randn(2, 3, 16, 8)
    original = theirs.torch_chunk_gated_delta_rule
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = with_gradients(original, tensors, **options)
    found = with_gradients(form, tensors, state, True, True)
    exact = [tensor.double() for tensor in tensors]
    right = with_gradients(reference.recurrent, exact, state.double(), True, True, compute_dtype=torch.float64)
    used = [allowed_error_used(*one) for one in zip(found, expected, right, strict=True)]
    assert max(used) <= 1, used


@pytest.mark.parametrize("bias", [None, torch.randn(12)])
def test_the_convolution(bias: torch.Tensor | None) -> None:
    """Also where there are as many tokens as channels, which no shape tells apart."""
    x, weight = torch.randn(2, 12, 12), torch.randn(12, 4)
    for activation in (None, "silu"):
        expected = theirs.causal_conv1d_fn(x, weight, bias, activation=activation)
        torch.testing.assert_close(reference.causal_convolution(x, weight, bias, activation), expected)


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [reference.chunked, reference.recurrent])
def test_a_packed_document_is_computed_as_alone(form: Any) -> None:
    first, second = inputs(70, seed=1), inputs(41, seed=2)
    packed = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
    states, bounds = torch.randn(2, 3, 16, 8), torch.tensor([0, 70, 111])
    out, last = form(*packed, states, True, True, bounds)
    empty = form(*packed, torch.cat((states[:1], states)), True, True, torch.tensor([0, 0, 70, 111]))
    assert torch.equal(empty[0], out) and torch.equal(empty[1], torch.cat((states[:1], last)))
    for number, (tensors, begin, end) in enumerate(((first, 0, 70), (second, 70, 111))):
        alone, state = form(*tensors, states[number : number + 1], True, True)
        torch.testing.assert_close(out[:, begin:end], alone)
        torch.testing.assert_close(last[number : number + 1], state)
    x, weight = torch.randn(1, 12, 9), torch.randn(12, 4)
    found = reference.causal_convolution(x, weight, None, "silu", torch.tensor([0, 4, 9]))
    parts = [reference.causal_convolution(part, weight, None, "silu") for part in (x[..., :4], x[..., 4:])]
    torch.testing.assert_close(found, torch.cat(parts, -1))


def test_documents_dont_leak_in_a_model() -> None:
    """What follows doesn't depend on what came before; by transformers' own functions it does, or they refuse."""
    model = linear_model()
    one, other = torch.arange(20, 27), torch.arange(40, 47)
    try:
        leaks = not torch.allclose(second_document(model, one), second_document(model, other))
    except ValueError as error:  # from transformers 5.24 on
        leaks = "can't keep packed sequences apart" in str(error)
    assert leaks, "or this would prove nothing"
    kernelize(model, TORCH)
    before = second_document(model, one)
    # Experts multiply the tokens of both documents together, which changes the last bits.
    torch.testing.assert_close(before, second_document(model, other), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(before, second_document(model, other[:0]), rtol=1e-4, atol=1e-5)
    row = report(model).row("fla")
    assert row.calls == 12 and row.fallbacks == {}
    unkernelize(model)


def test_a_cache_puts_tokens_in_front_of_the_first_document() -> None:
    convolution = get_op("fla").implementations["torch"].load("fla")["causal_conv1d_fn"]
    x, weight, bounds = torch.randn(1, 12, 12), torch.randn(12, 4), torch.tensor([0, 4, 9])
    found = convolution(x, weight, None, "silu", cu_seq_lens_q=bounds)
    expected = reference.causal_convolution(x, weight, None, "silu", torch.tensor([0, 7, 12]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_a_query_head_for_several_of_values(name: str) -> None:
    """As transformers calls the rules from 5.24 on; before, it repeated the heads itself."""
    rule = get_op("fla").implementations["torch"].load("fla")[name]
    query, key, value, g, beta = inputs(9)
    few = query[:, :, :1], key[:, :, :1]
    many = (tensor.expand_as(query) for tensor in few)
    found = rule(*few, value, g, beta, output_final_state=True)
    torch.testing.assert_close(found, rule(*many, value, g, beta, output_final_state=True))


def test_calls_that_make_no_sense_are_left_to_the_original() -> None:
    functions = get_op("fla").implementations["torch"].load("fla")
    packed = "packed documents in more than one row"
    rule, convolution = functions["torch_chunk_gated_delta_rule"], functions["causal_conv1d_fn"]
    bounds = torch.tensor([0, 2, 5])
    assert rule.accepts_call(*inputs(5, batch=2), cu_seqlens=bounds) == packed
    assert rule.accepts_call(*inputs(5), cu_seqlens=bounds) is None
    x, weight = torch.randn(2, 12, 5), torch.randn(12, 4)
    assert convolution.accepts_call(x, weight, activation="silu", cu_seq_lens_q=bounds) == packed
    assert convolution.accepts_call(x, weight, activation="gelu") == "the activation gelu"
    assert convolution.accepts_call(x, weight, activation="silu") is None


# --- installed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_gated_delta_nets(name: str) -> None:
    original = presets.build(name)
    model = kernelize(copy.deepcopy(original), TORCH)
    row = report(model).row("fla")
    assert (row.state, row.backend, row.scope, row.instances) == ("installed", "torch", "process", 1)
    comparisons = compare_models(original, model, presets.inputs(model), presets.loss)
    assert [c for c in comparisons if c.used > 1] == []
    assert row.calls == 2 and row.fallbacks == {} and row.errors == 0, "the rule and the convolution"
    home = sys.modules[next(type(m).__module__ for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))]
    assert hasattr(home.torch_chunk_gated_delta_rule, "twinkle_router")
    assert unkernelize(model).not_undone == ()
    assert not hasattr(home.torch_chunk_gated_delta_rule, "twinkle_router")


def test_it_generates_what_the_original_generates() -> None:
    """Prefill, then token by token with the recurrent rule and the cache."""
    model = presets.build("qwen3_next").eval()
    ids = torch.arange(5, 12)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    kernelize(model, TORCH)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
    assert report(model).row("fla").calls >= 9
    unkernelize(model)


def test_two_models_share_it() -> None:
    first, second = presets.build("qwen3_next"), presets.build("qwen3_next")
    for model in (first, second):
        kernelize(model, TORCH)
        assert report(model).row("fla").state == "installed"
    first(**presets.inputs(first))
    assert report(first).row("fla").calls == report(second).row("fla").calls == 2
    assert unkernelize(first).shared and not unkernelize(second).shared


def test_a_model_without_such_layers_is_a_row_and_no_success() -> None:
    model = kernelize(presets.build("llama"), TORCH)
    row = report(model).row("fla")
    assert (row.state, row.instances, row.why()) == ("unused", 0, "nothing in this model is what its op serves")
