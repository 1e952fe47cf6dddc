"""The logical names ``sdpa`` and ``fla``: their ops' installers, process-wide and undone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl, register_backend
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

calls: list[str] = []


def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    calls.append("attention")
    return sdpa_attention_forward(module, *args, **kwargs)


@pytest.fixture(autouse=True)
def backends(own_registry: None) -> Iterator[None]:
    calls.clear()
    register_backend("sdpa_attention", "mine", KernelImpl(lambda target: attention, lambda: (True, None)))
    register_backend("fla", "mine", KernelImpl(lambda target: {"l2norm": l2norm}, lambda: (True, None)))
    yield


def l2norm(x: Any, dim: int = -1, eps: float = 1e-6) -> Any:
    calls.append("l2norm")
    return x * (x * x).sum(dim=dim, keepdim=True).add(eps).rsqrt()


def test_sdpa_is_registered_for_the_process_and_taken_back() -> None:
    model = presets.build("llama", attn_implementation="sdpa")
    expected = model(**presets.inputs(model)).logits
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("mine",))})
    row = report(model).row("sdpa")
    assert (row.state, row.backend, row.instances, row.scope) == ("installed", "mine", 2, "process")
    assert (model(**presets.inputs(model)).logits == expected).all()
    assert calls == ["attention"] * 2
    assert unkernelize(model).patches == 1
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_sdpa_where_a_file_has_a_registry_entry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sdpa_attention_forward)
    model = presets.build("llama", attn_implementation="sdpa")
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("mine",))})
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].twinkle_router.served_by == ("sdpa_attention", "mine")
    model(**presets.inputs(model))
    assert calls == ["attention"] * 2 and report(model).row("sdpa").calls == 2
    assert unkernelize(model).patches == 2
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_sdpa_without_a_layer_that_uses_it_is_a_row_and_no_change() -> None:
    model = presets.build("llama", attn_implementation="eager")
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("mine",))})
    row = report(model).row("sdpa")
    assert (row.state, row.instances) == ("unused", 0)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_fla_rebinds_the_functions_of_the_model_s_own_file() -> None:
    model = presets.build("qwen3_next")
    home = sys.modules[type(model).__module__]
    original = home.l2norm
    kernelize(model, {"fla": KernelChoice("fla", ("mine",))})
    row = report(model).row("fla")
    assert (row.state, row.instances, row.scope) == ("installed", 1, "process")
    model(**presets.inputs(model))
    assert calls
    unkernelize(model)
    assert home.l2norm is original


def test_fla_on_a_model_without_such_layers_is_a_row() -> None:
    model = presets.build("llama")
    kernelize(model, {"fla": KernelChoice("fla", ("mine",))})
    assert report(model).row("fla").state == "unused"
