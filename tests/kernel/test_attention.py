"""``sdpa_attention`` by PyTorch's function: every kind of call against transformers' eager attention; and installed."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.attention import CASES, call, judged, module_for
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.sdpa_attention import masks
from twinkle.kernel.ops.sdpa_attention import torch as backend
from twinkle.kernel.ops.sdpa_attention.inputs import UNSERVED, additive
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

attention = backend.load(None)
MODULE = types.SimpleNamespace(is_causal=True)
CHOICE = {"sdpa": KernelChoice("sdpa_attention", ("torch",))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_kind_of_call(dtype: torch.dtype) -> None:
    """Output and gradients."""
    used = {case: judged(attention, case, dtype, "cpu") for case in CASES}
    assert {case: shares for case, shares in used.items() if max(shares.values()) > 1} == {}


@pytest.mark.parametrize("as_numbers", [False, True])
def test_a_row_without_keys_is_the_mean_of_the_values(as_numbers: bool) -> None:
    """As in eager attention, the values' gradient too; PyTorch's own function has other ones."""
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    mask[:, :, 1:] = True
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if as_numbers else mask
    out, _ = attention(types.SimpleNamespace(is_causal=True), query, key, value, given)
    torch.testing.assert_close(out[:, 0], value.mean(2))
    gradients = torch.autograd.grad(out[:, 0].sum(), (query, key, value))
    torch.testing.assert_close(gradients[2], torch.full_like(value, 1 / 5))
    assert not gradients[0].any() and not gradients[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", ["mask", "bias"])
def test_a_mask_of_more_digits_than_the_scores_has_rows_without_keys(dtype: torch.dtype, wide: str) -> None:
    """The lowest number is that of the scores' dtype, as transformers' masks have it, whatever the mask's own."""
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(3))
    kept = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    kept[:, :, 2] = False
    mask = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(dtype).min)
    given = (mask, {}) if wide == "mask" else (kept, {"position_bias": torch.randn(1, 2, 5, 5)})
    out, _ = attention(types.SimpleNamespace(is_causal=True), query, key, value, given[0], **given[1])
    torch.testing.assert_close(out[:, 2], value.mean(2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_added_is_a_number(dtype: torch.dtype) -> None:
    """Minus infinity less minus infinity is none, in fused kernels' running maxima."""
    given = torch.tensor([float("-inf"), torch.finfo(torch.float32).min, -2.0])
    lowest = torch.finfo(dtype).min
    assert additive(given, dtype).tolist() == [lowest, lowest, -2.0]
    assert additive(torch.tensor([True, False]), dtype).tolist() == [0, lowest]
    narrow = torch.tensor([float("-inf"), 1.0], dtype=torch.float16)
    assert additive(narrow, dtype).tolist() == [torch.finfo(torch.float16).min, 1]


def test_a_graded_mask_is_not_made_boolean() -> None:
    """As one of -inf and 0 might be."""
    (case,) = (case for case in CASES if case == ("graded", (None, True), 1, (7, 7)))
    tensors, options = call(case, torch.float32, "cpu")
    graded, _ = attention(module_for(case), *tensors, **options)
    flat, _ = attention(module_for(case), *tensors, **options | {"attention_mask": options["attention_mask"] == 0})
    assert (graded - flat).abs().max() > 0.1


@pytest.mark.parametrize("as_numbers", [False, True])
def test_a_mask_is_looked_at_once_for_all_layers(as_numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until somebody writes into it. A layer's own mask, and one of which a part was taken, are looked at each time."""
    looked_at: list[torch.Tensor] = []
    found = masks.without_empty_rows
    monkeypatch.setattr(masks, "without_empty_rows", lambda *given: looked_at.append(given[0]) or found(*given))
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    kept = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask = torch.where(kept, 0.0, torch.finfo(torch.float32).min) if as_numbers else kept
    results = [attention(MODULE, query, key, value, mask)[0] for _ in range(3)]
    assert len(looked_at) == 1 and torch.equal(results[0], results[2])
    mask[..., 1:] = mask[..., 1:].amin() if as_numbers else False
    assert not torch.equal(attention(MODULE, query, key, value, mask)[0], results[0]) and len(looked_at) == 2
    longer = torch.cat((mask, mask), -1)
    for _ in range(2):
        attention(MODULE, query, key, value, longer)
    attention(MODULE, query, key, value, mask, position_bias=torch.zeros(1, 2, 5, 5))
    assert len(looked_at) == 5


@pytest.mark.parametrize("as_numbers", [False, True])
def test_what_an_evaluation_found_out_about_a_mask_serves_a_training(as_numbers: bool) -> None:
    query, key, value = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    kept = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(-1)  # the first row has no key
    mask = torch.where(kept, 0.0, torch.finfo(torch.float32).min) if as_numbers else kept
    with torch.inference_mode():
        attention(MODULE, query, key, value, mask)
    attention(MODULE, query, key, value, mask)[0].sum().backward()
    assert query.grad is not None


def test_a_mask_that_a_compilers_graph_fills_anew_is_looked_at_each_time() -> None:
    """CUDA graphs of torch.compile give the same tensor each time, and nobody counts what they write."""
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(mask)
    try:
        attention(MODULE, query, key, value, mask)
        mask.data[:, :, 2] = False
        torch.testing.assert_close(attention(MODULE, query, key, value, mask)[0][:, 2], value.mean(2))
    finally:
        torch._C._remove_cached_tensor(mask)
        torch._C._set_cached_tensors_enabled(False)


def test_selective_checkpointing_meets_the_same_operators_twice() -> None:
    """What was found out about a mask in the first forward isn't found out again in the second."""
    mask = torch.where(torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), 0.0, torch.finfo(torch.float32).min)
    leaves = [torch.randn(1, 2, 5, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def block(*qkv: torch.Tensor) -> torch.Tensor:
        out = attention(MODULE, *qkv, mask)[0]
        return (out.float().clamp(min=-1).to(torch.bfloat16) * out).float()

    def saves_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, saves_all)
    again = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts).sum()
    torch.testing.assert_close(torch.autograd.grad(again, leaves), torch.autograd.grad(block(*leaves).sum(), leaves))


def test_a_mask_with_numbers_among_fake_tensors() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.empty(1, 2, 5, 16) for _ in range(3))
        assert attention(MODULE, query, key, value, mask)[0].shape == (1, 5, 2, 16)
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    assert type(attention(MODULE, query, key, value, mask)[0]) is torch.Tensor, "what was found out is not fake"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("trace", [make_fx, torch.jit.trace], ids=["make_fx", "torch.jit.trace"])
def test_a_trace_serves_other_masks(trace: Any, as_numbers: bool) -> None:
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    kept = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    first, second = (torch.where(m, 0.0, -1e38) if as_numbers else m for m in (kept, kept.flip(-1)))

    def function(*given: torch.Tensor) -> torch.Tensor:
        return attention(MODULE, *given)[0]

    expected = function(query, key, value, second)
    example = query, key, value, first
    function(*example)
    traced = trace(function)(*example) if trace is make_fx else trace(function, example)
    torch.testing.assert_close(traced(query, key, value, second), expected)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_for_any_number_of_heads(masked: bool, heads: int) -> None:
    query, key, value = (torch.randn(2, n, 5, 16) for n in (2, heads, heads))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril() if masked else None
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: attention(MODULE, *given)[0], fullgraph=True, dynamic=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(query, key, value, mask), attention(MODULE, query, key, value, mask)[0])


def test_under_autocast_rows_without_keys_change_no_dtype() -> None:
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(-1)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(MODULE, query, key, value, mask)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[:, 0], value.mean(2).bfloat16())


def test_tensors_without_numbers_are_asked_for_none() -> None:
    query, key, value = (torch.empty(1, 2, 5, 16, device="meta") for _ in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device="meta")
    assert attention(MODULE, query, key, value, mask)[0].shape == (1, 5, 2, 16)


def test_a_learned_bias_has_its_gradient_and_nothing_is_remembered_of_it() -> None:
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    for _ in range(2):
        attention(MODULE, query, key, value, bias)[0].sum().backward()
    assert bias.grad is not None and bias not in masks._memory(torch.float32)


def test_its_result_has_the_layout_that_layers_expect() -> None:
    query = torch.randn(2, 4, 5, 16)
    out, weights = attention(types.SimpleNamespace(is_causal=True), query, query, query, None)
    assert out.shape == (2, 5, 4, 16) and out.is_contiguous() and weights is None


def test_a_static_cache_is_longer_than_what_is_written() -> None:
    """Keys behind the queries are left out in the first step, a mask wider than the keys is cut."""
    module, query, keys = types.SimpleNamespace(is_causal=True), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    bias, garbage = torch.randn(1, 2, 4, 9), keys.clone()
    garbage[:, :, 4:] = float("nan")
    for options in ({}, {"position_bias": bias}):
        expected = attention(module, query, keys, keys, None, **options)[0]
        assert torch.equal(attention(module, query, garbage, garbage, None, **options)[0], expected)
    wide = torch.ones(1, 1, 4, 12, dtype=torch.bool)
    assert torch.equal(
        attention(module, query, keys, keys, wide)[0], attention(module, query, keys, keys, wide[..., :9])[0]
    )


def test_dropout_drops() -> None:
    torch.manual_seed(0)
    ones = torch.ones(1, 1, 64, 8)
    out, _ = attention(types.SimpleNamespace(is_causal=False), torch.randn(1, 1, 64, 8), ones, ones, None, dropout=0.5)
    assert out.std() > 0.01 and abs(out.mean() - 1) < 0.1


@pytest.mark.parametrize("name", UNSERVED)
def test_what_it_has_no_part_in_is_left_to_the_original(name: str) -> None:
    query = torch.randn(1, 2, 3, 8)
    arguments = (None, query, query, query, None)
    reason = attention.accepts_call(*arguments, **{name: torch.ones(2) if name == "s_aux" else 30.0})
    assert reason == UNSERVED[name] and attention.accepts_call(*arguments, **{name: None}) is None


@pytest.mark.parametrize(
    ("key", "mask", "words"),
    [
        (torch.randn(1, 3, 3, 8), None, "queries and keys of"),
        (torch.randn(2, 3, 8), None, "queries and keys of"),
        (torch.randn(1, 2, 3, 8), torch.ones(3, 3), "four dimensions"),
        (torch.randn(1, 2, 3, 8), torch.ones(1, 1, 3, 3, dtype=torch.int64), "neither boolean nor added"),
    ],
)
def test_shapes_that_it_does_not_take(key: torch.Tensor, mask: Any, words: str) -> None:
    assert words in attention.accepts_call(None, torch.randn(1, 2, 3, 8), key, key, mask)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2_5_vl"])
def test_installed_counted_and_undone(name: str) -> None:
    original, model = (presets.build(name, attn_implementation="sdpa") for _ in range(2))
    kernelize(model, CHOICE, verify=True)
    row = report(model).row("sdpa")
    assert (row.state, row.backend, row.scope, row.verified) == ("installed", "torch", "process", True)
    comparisons = compare_models(original, model, presets.inputs(model), presets.loss)
    assert max(c.used for c in comparisons) <= 1
    assert row.calls >= (row.instances or 0) > 0 and row.fallbacks == {} and row.errors == 0
    assert unkernelize(model).not_undone == ()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_two_models_share_it_and_another_backend_is_refused() -> None:
    first, second, third = (presets.build("llama", attn_implementation="sdpa") for _ in range(3))
    for model in (first, second):
        kernelize(model, CHOICE)
        assert report(model).row("sdpa").state == "installed"
    kernelize(third, {"sdpa": KernelChoice("sdpa_attention", ("inductor",))})
    assert report(third).row("sdpa").state == "refused"
    assert "already carries another kernel" in report(third).row("sdpa").why()
    first(**presets.inputs(first))
    assert report(first).row("sdpa").calls == report(second).row("sdpa").calls == 2, "they count together"
    assert unkernelize(first).shared
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
    unkernelize(second)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_what_somebody_else_registered_since_stays_and_is_named() -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    model = kernelize(presets.build("llama", attn_implementation="sdpa"), CHOICE)
    ALL_ATTENTION_FUNCTIONS.register("sdpa", theirs)
    try:
        (reason,) = unkernelize(model).not_undone
        assert reason.text == "the entry 'sdpa' (sdpa_attention_forward) was replaced by somebody else"
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)


def test_both_places_of_the_registry_are_changed_and_undone() -> None:
    """An entry of this process's own goes before the one that all share."""

    def own(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        model = kernelize(presets.build("llama", attn_implementation="sdpa"), CHOICE)
        model(**presets.inputs(model))
        assert report(model).row("sdpa").calls == 2
        assert unkernelize(model).not_undone == ()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_a_soft_cap_goes_to_transformers_and_is_counted() -> None:
    model = presets.build("gemma2")
    model.config._attn_implementation = "sdpa"
    kernelize(model, CHOICE)
    with contextlib.suppress(ValueError):  # transformers' own function refuses it from 5.24 on
        model(**presets.inputs(model))
    row = report(model).row("sdpa")
    assert row.calls == 0 and set(row.fallbacks) == {UNSERVED["softcap"]}
    unkernelize(model)
