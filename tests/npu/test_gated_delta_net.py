"""``fla`` on an NPU: torch_npu's rule where no gradient is wanted; what it was probed for; flash-linear-attention."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.kernel.test_flash_linear_attention import package  # noqa: F401
from tests.support.linear_attention import inputs, linear_model, second_document, write_package
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.fla import library, npu, reference
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, compare_models

NPU = torch.device("npu")
SITE = Site(None, "fla", None, "fla", None, NPU, torch.bfloat16)
OURS = {"fla": KernelChoice("fla", ("npu",))}


def on_npu(*arguments: Any, **options: Any) -> list[torch.Tensor]:
    return [tensor.to("npu") for tensor in inputs(*arguments, dtype=torch.bfloat16, **options)]


def rule() -> Any:
    return npu.load(None, SITE)["torch_chunk_gated_delta_rule"]


@pytest.mark.parametrize("state", [None, torch.randn(2, 3, 16, 8)])
@pytest.mark.parametrize("normalised", [True, False])
def test_it_is_within_the_judgement(state: torch.Tensor | None, normalised: bool, called: Counter[str]) -> None:
    tensors = on_npu(70, batch=2)
    start = None if state is None else state.to("npu")
    options = {"initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": normalised}
    function = rule()
    called.clear()
    found = function(*tensors, **options)
    assert called["npu_chunk_gated_delta_rule"] == 1
    expected = reference.chunked(*tensors, start, True, normalised)
    exact = [tensor.double() for tensor in tensors]
    wide = None if start is None else start.double()
    right = reference.recurrent(*exact, wide, True, normalised, compute_dtype=torch.float64)
    assert allowed_error_used(found[0], expected[0], right[0]) <= 1
    torch.testing.assert_close(found[1].double(), right[1], rtol=2e-2, atol=2e-2)
    assert function(*tensors)[1] is None, "no state where none is wanted"


def test_a_packed_document_doesnt_depend_on_the_one_before() -> None:
    """Neither by the rule nor by the convolution; the rule alone, whatever was computed before."""
    bounds = torch.tensor([0, 7, 15], device="npu")
    one, other = on_npu(15, seed=1), on_npu(15, seed=2)
    other = [torch.cat((b[:, :7], a[:, 7:]), 1) for a, b in zip(one, other, strict=True)]
    assert torch.equal(*[rule()(*tensors, cu_seqlens=bounds)[0][:, 7:] for tensors in (one, other)])
    model = linear_model().to("npu", torch.bfloat16)
    first, second = torch.arange(20, 27), torch.arange(40, 47)
    with torch.no_grad():
        assert not torch.allclose(second_document(model, first), second_document(model, second)), "or it proves nothing"
        kernelize(model, OURS)
        results = [second_document(model, ids) for ids in (first, second, first[:0])]
    # Experts multiply the tokens of both documents together, which may change the last bits.
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
    row = report(model).row("fla")
    assert row.calls == 12 and row.fallbacks == {}, "rule and convolution of two layers, three times"
    unkernelize(model)


def test_training_on_packed_documents_says_what_the_original_does() -> None:
    """It drops their bounds; and what to do."""
    model = linear_model().to("npu", torch.bfloat16)
    kernelize(model, OURS)
    second_document(model, torch.arange(20, 27))
    row = report(model).row("fla")
    assert row.fallbacks == {f"{npu.NO_GRADIENT}; {npu.SEE_EACH_OTHER}": 2} and row.calls == 2
    kernelize(model, {"fla": KernelChoice("fla", ("fla", "torch"))})
    results = [second_document(model, ids) for ids in (torch.arange(20, 27), torch.arange(40, 47))]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    unkernelize(model)


def test_a_convolution_is_served_where_documents_are_packed() -> None:
    convolution = npu.load(None, SITE)["causal_conv1d_fn"]
    x, weight, bounds = (t.to("npu") for t in (torch.randn(1, 12, 9), torch.randn(12, 4), torch.tensor([0, 4, 9])))
    assert convolution.accepts_call(x, weight, activation="silu") == npu.NOT_PACKED
    assert convolution.accepts_call(x, weight, activation="silu", cu_seq_lens_q=bounds) is None
    assert "not on an NPU" in convolution.accepts_call(x.cpu(), weight, activation="silu", cu_seq_lens_q=bounds)
    parts = [convolution(part, weight, activation="silu") for part in (x[..., :4], x[..., 4:])]
    found = convolution(x, weight, activation="silu", cu_seq_lens_q=bounds)
    torch.testing.assert_close(found, torch.cat(parts, -1))


@pytest.mark.parametrize("value_first", [True, False])
def test_the_order_of_a_state_is_found_out(value_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    published = torch_npu.npu_chunk_gated_delta_rule

    def other_order(*tensors: Any, initial_state: torch.Tensor, **options: Any) -> Any:
        out, state = published(*tensors, initial_state=initial_state.transpose(-1, -2).contiguous(), **options)
        return out, state.transpose(-1, -2).contiguous()

    if not value_first:
        monkeypatch.setattr(torch_npu, "npu_chunk_gated_delta_rule", other_order)
    assert npu.state_has_value_first(NPU) is value_first

    def wrong(*tensors: Any, **options: Any) -> Any:
        out, state = published(*tensors, **options)
        return 2 * out, state

    monkeypatch.setattr(torch_npu, "npu_chunk_gated_delta_rule", wrong)
    with pytest.raises(RuntimeError, match="gives other results than the rule"):
        npu.state_has_value_first(NPU)
    model = kernelize(presets.build("qwen3_next", device="npu"), OURS)
    row = report(model).row("fla")
    assert row.state == "kept" and "gives other results than the rule" in row.why()


def test_calls_that_it_does_not_take() -> None:
    function, tensors = rule(), on_npu(5)
    assert function.accepts_call(*tensors) is None
    assert "of fp32" in function.accepts_call(*[tensor.double() for tensor in tensors])
    assert function.accepts_call(*[tensor.float() for tensor in tensors]) == "the dtype isn't bf16"
    tensors[2].requires_grad_()
    assert function.accepts_call(*tensors) == npu.NO_GRADIENT
    with torch.no_grad():
        assert function.accepts_call(*tensors) is None


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_model_generates_by_it_and_trains_by_the_original(name: str) -> None:
    model = presets.build(name, device="npu", dtype=torch.bfloat16)
    given = presets.inputs(model, device="npu")
    with torch.no_grad():
        expected = model(**given).logits
    kernelize(model, OURS)
    row = report(model).row("fla")
    assert (row.state, row.backend, row.instances) == ("installed", "npu", 1)
    with torch.no_grad():
        assert (model(**given).logits - expected).norm() <= 0.1 * expected.norm()
    assert (row.calls, row.fallbacks) == (1, {npu.NOT_PACKED: 1})
    presets.loss(model(**given)).backward()
    assert row.calls == 1 and row.fallbacks == {npu.NO_GRADIENT: 1, npu.NOT_PACKED: 2}
    unkernelize(model)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ON_NPU, "off")
    model = presets.build("qwen3_next", device="npu", dtype=torch.bfloat16)
    kernelize(model, OURS)
    row = report(model).row("fla")
    assert row.state == "refused" and "TWINKLE_NPU_FLA is off" in row.why()
    assert "TWINKLE_NPU_FLA is off" in str(library.accepts(SITE))
    for value in ("1", "on"):
        monkeypatch.setenv(library.ON_NPU, value)
        kernelize(model, OURS)
        assert report(model).row("fla").state == "installed"
    unkernelize(model)


def test_elsewhere_it_is_refused() -> None:
    model = kernelize(presets.build("qwen3_next"), OURS)
    assert "run on npu, not on cpu" in report(model).row("fla").why()


def test_by_flash_linear_attention(package: Path) -> None:  # noqa: F811
    """A stand-in with the library's parameters: layouts, dtypes and gradients on this device, not its kernels."""
    write_package(package)
    original = presets.build("qwen3_next", device="npu", dtype=torch.bfloat16)
    model = kernelize(copy.deepcopy(original), {"fla": KernelChoice("fla", ("fla", "npu"))})
    comparisons = compare_models(original, model, presets.inputs(model, device="npu"), presets.loss)
    assert sorted(c.used for c in comparisons)[-3] <= 1
    row = report(model).row("fla")
    assert (row.backend, row.calls, row.fallbacks) == ("fla", 2, {})
    unkernelize(model)
