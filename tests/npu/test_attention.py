"""``sdpa_attention`` by torch_npu: every kind of call against transformers' eager attention; and installed."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.attention import CASES, judged
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.sdpa_attention import npu as backend
from twinkle.kernel.ops.sdpa_attention.inputs import UNSERVED
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

NPU = torch.device("npu")
SITE = Site(None, "sdpa", None, "sdpa", None, NPU, torch.bfloat16)


def attention(*args: Any, **kwargs: Any) -> Any:
    function = backend.load(None, SITE)
    assert function.accepts_call(*args, **kwargs) is None
    return function(*args, **kwargs)


def query_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("npu", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", sorted({case.mask for case in CASES}))
def test_every_kind_of_call(mask: str, dtype: torch.dtype) -> None:
    """Output and gradients, and the position bias's."""
    used = {case: judged(attention, case, dtype, "npu") for case in CASES if case.mask == mask}
    assert {case: shares for case, shares in used.items() if max(shares.values()) > 1} == {}


def test_how_the_bias_meets_the_scale_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    published = torch_npu.npu_fusion_attention
    assert backend.scaled_with_the_scores(NPU) is True

    def after_the_scale(*args: Any, pse: torch.Tensor, scale: float, **options: Any) -> Any:
        return published(*args, pse=pse / scale, scale=scale, **options)

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", after_the_scale)
    assert backend.scaled_with_the_scores(NPU) is False

    def never(*args: Any, pse: torch.Tensor, **options: Any) -> Any:
        return published(*args, **options)

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", never)
    with pytest.raises(RuntimeError, match="neither before nor after the scores are scaled"):
        backend.scaled_with_the_scores(NPU)


def test_dropout_is_the_same_in_the_backward() -> None:
    """What was dropped has no gradient: each value's is its weight in the sum."""
    module = types.SimpleNamespace(is_causal=False)
    query, value = query_of(1, 1, 64, 16), query_of(1, 1, 64, 16).requires_grad_()
    out, _ = attention(module, torch.zeros_like(query), query, value, None, dropout=0.5)
    (gradient,) = torch.autograd.grad(out.sum(), value)
    assert float((gradient != gradient[0, 0, 0, 0]).float().mean()) > 0.3, "all alike without dropout"
    torch.testing.assert_close((gradient.float() * value.float()).sum(), out.float().sum(), rtol=0.1, atol=1.0)


def test_causal_attention_needs_no_mask_of_the_lengths(called: Counter[str]) -> None:
    module, query = types.SimpleNamespace(is_causal=True), query_of(1, 2, 5, 16)
    attention(module, query, query, query, None)
    assert called["npu_fusion_attention"] >= 1
    assert backend._pattern(query.device).shape == (2048, 2048)


@pytest.mark.parametrize(
    ("query", "key", "options", "words"),
    [
        (query_of(1, 2, 5, 16), query_of(1, 2, 5, 16), {"softcap": 3.0}, UNSERVED["softcap"]),
        (query_of(1, 2, 5, 16).cpu(), query_of(1, 2, 5, 16), {}, "not on an NPU"),
        (query_of(1, 2, 5, 16), query_of(1, 2, 5, 16).float(), {}, "different dtypes"),
        (query_of(1, 257, 1, 16), query_of(1, 257, 1, 16), {}, "256 heads"),
        (query_of(1, 1, 1, 520), query_of(1, 1, 1, 520), {}, "512 channels"),
        (query_of(1, 3, 5, 16), query_of(1, 2, 5, 16), {}, "queries and keys of"),
    ],
)
def test_calls_that_it_does_not_take(query: Any, key: Any, options: dict[str, Any], words: str) -> None:
    assert words in backend.load(None, SITE).accepts_call(None, query, key, key, None, **options)


def test_values_of_another_width() -> None:
    query = query_of(1, 2, 5, 16)
    reason = backend.load(None, SITE).accepts_call(None, query, query, query_of(1, 2, 5, 8), None)
    assert reason == "values of another width than queries"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2_5_vl", "qwen3_5"])
def test_installed_counted_and_undone(name: str) -> None:
    original, model = (
        presets.build(name, device="npu", dtype=torch.bfloat16, attn_implementation="sdpa") for _ in range(2)
    )
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("npu",))}, verify=True)
    row = report(model).row("sdpa")
    assert (row.state, row.backend, row.scope, row.verified) == ("installed", "npu", "process", True), row.why()
    comparisons = compare_models(original, model, presets.inputs(model, device="npu"), presets.loss)
    assert sorted(c.used for c in comparisons)[-2] <= 1
    assert row.calls >= (row.instances or 0) > 0 and row.fallbacks == {} and row.errors == 0
    assert unkernelize(model).not_undone == ()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_elsewhere_it_is_refused() -> None:
    model = presets.build("llama", attn_implementation="sdpa")
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("npu",))})
    row = report(model).row("sdpa")
    assert row.state == "refused" and "run on npu, not on cpu" in row.why()
