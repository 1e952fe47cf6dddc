"""In which models the fused norms are installed, and what those compute with them, by the reference's maths."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support import fused_lookalikes as lookalikes
from tests.support.models import assert_close, clean_process, differences, look, step  # noqa: F401
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.config import OPT_IN_KERNEL_CONFIG
from twinkle.kernel.report import Row, plan, report
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize

QK = {"fused_qk": KernelChoice("qk_norm_rotary", ("loopback",))}
ADD = {"fused_add_norm": KernelChoice("add_rms_norm", ("loopback",))}
FUSED = {**QK, **ADD}

BOTH = {  # family -> attention modules, layers
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3"), (2, 2)),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), (1, 2)),  # one layer of two has linear attention
}
LAYERS_ALONE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma2", "granite", "phi3", "glm4", "gpt_oss", "deepseek_v3"), 2),
    "mistral3": 4,  # those of its vision tower too
    "gemma4": 3,
}
NEITHER = ("olmo2", "olmo3", "exaone4", "cohere2", "starcoder2", "deepseek_v4")


def row(model: nn.Module, key: str = "fused_qk") -> Row:
    return report(model).row(key)


def states(model: nn.Module) -> tuple[Any, ...]:
    return tuple(row(model, key).instances if row(model, key).state == "installed" else None for key in FUSED)


# --- models -----------------------------------------------------------------------------------------------------------

QUICK = ("qwen3", "gemma3", "qwen3_next", "granite", "olmo2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*BOTH, *LAYERS_ALONE, *NEITHER)],
)
def test_a_family(name: str) -> None:
    original = presets.build(name)
    expected, before = step(original), look(original)
    model = kernelize(original, FUSED)
    installed = BOTH.get(name) or (None, LAYERS_ALONE.get(name))
    assert states(model) == installed
    assert_close(step(model), expected)
    assert [row(model, key).calls for key in FUSED] == [count or 0 for count in installed]
    assert not any(row(model, key).fallbacks for key in FUSED)
    assert all(row(model, key).why() for key, count in zip(FUSED, installed, strict=True) if count is None)
    assert unkernelize(model).not_undone == ()
    assert differences(before, look(model)) == []


def test_with_the_default_config_before_and_after() -> None:
    """Norms that the op rms_norm serves, and a rotary function that the op rotary serves, are the same norms."""
    everything = with_backends({**DEFAULT_KERNEL_CONFIG, **FUSED}, "loopback")
    default = {key: choice for key, choice in everything.items() if key not in FUSED}
    original = presets.build("qwen3")
    expected, before = step(original), look(original)
    for mappings in ([everything], [default, FUSED], [FUSED, default]):
        model = copy.deepcopy(original)
        for mapping in mappings:
            kernelize(model, mapping)
        assert_close(step(model), expected)
        assert (states(model), row(model).calls, row(model).fallbacks) == ((2, 2), 2, {})
        assert report(model).row("Qwen3RMSNorm").calls == 3, "the others are called as ever"
        assert report(model).row("apply_rotary_pos_emb").calls == 0
        assert unkernelize(model).not_undone == ()
    assert differences(before, look(original)) == []


def test_verified_and_opt_in() -> None:
    assert not FUSED.keys() & DEFAULT_KERNEL_CONFIG.keys() and FUSED.keys() < OPT_IN_KERNEL_CONFIG.keys()
    model = kernelize(presets.build("qwen3"), FUSED, verify=True, strict=True)
    assert all(row(model, key).verified for key in FUSED)
    assert plan(presets.build("llama"), FUSED).row("fused_qk").state == "unused"
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_generation_with_a_cache(name: str) -> None:
    model = presets.build(name)
    inputs = {"input_ids": torch.arange(3, 11)[None], "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    expected = model.generate(**inputs)
    kernelize(model, FUSED)
    assert torch.equal(model.generate(**inputs), expected)
    assert row(model).calls == row(model, "fused_add_norm").calls == 12
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "llama"])
def test_checkpointed(name: str) -> None:
    model = presets.build(name).train()
    model.gradient_checkpointing_enable()
    expected = step(model)
    kernelize(model, FUSED)
    assert_close(step(model), expected)
    assert row(model, "fused_add_norm").calls == 4, "once forward, and once again for the backward"
    unkernelize(model)


def test_autocast_gives_the_dtypes_that_the_model_gives() -> None:
    model = presets.build("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        ours = step(kernelize(model, FUSED))
    assert {key: t.dtype for key, t in ours.items()} == {key: t.dtype for key, t in expected.items()}
    assert row(model).calls == 2
    unkernelize(model)


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "gate_proj"], ["q_norm", "q_proj"]], ids=str)
@pytest.mark.parametrize("adapt_first", [True, False])
def test_adapters(adapt_first: bool, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(0)
        saved = [name for name in targets if "norm" in name]
        linear = [name for name in targets if name not in saved]
        config = peft.LoraConfig(r=2, target_modules=linear, modules_to_save=saved or None, init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data *= 1.5
        return model

    expected = step(adapted(presets.build("qwen3")))
    model = presets.build("qwen3")
    model = kernelize(adapted(model), FUSED) if adapt_first else adapted(kernelize(model, FUSED))
    assert_close(step(model), expected)
    assert row(model, "fused_add_norm").calls == 2
    if "q_norm" not in targets:
        assert row(model).calls == 2
    elif adapt_first:
        assert "q_norm is no RMSNorm" in row(model).why()
    else:
        assert row(model).calls == 0 and sum(row(model).fallbacks.values()) == 2
    assert unkernelize(model).not_undone == ()


def test_layers_share_a_class_and_copies_and_files_are_what_they_should_be() -> None:
    original = presets.build("qwen3")
    expected = step(original)
    model = kernelize(original, FUSED)
    layers = model.model.layers
    assert type(layers[0]) is type(layers[1]) and type(layers[0].self_attn) is type(layers[1].self_attn)
    twin = copy.deepcopy(model)
    assert_close(step(twin), expected)
    assert row(twin).calls == 2
    unkernelize(model)
    assert states(twin) == (2, 2), "the copy has its own"
    unkernelize(twin)
    layer, file = kernelize(lookalikes.Layer(), ADD), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert report(loaded).rows == [] and type(loaded) is lookalikes.Layer
    torch.testing.assert_close(loaded(torch.ones(2, 16)), layer(torch.ones(2, 16)))
    unkernelize(layer)


def test_compiled_whole_and_layer_by_layer() -> None:
    torch.compiler.reset()
    model = presets.build("qwen3", num_hidden_layers=3)
    inputs = presets.inputs(model) | {"use_cache": False}  # every layer's cache would be compiled for itself
    expected = model(**inputs).logits
    kernelize(model, with_backends({**DEFAULT_KERNEL_CONFIG, **FUSED}, "loopback"))
    graphs: list[Any] = []

    def note(graph: Any, arguments: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=note)(**inputs).logits, expected)
    assert len(graphs) == 1 and all(row(model, key).counts.compiled for key in FUSED)
    assert not any(row(model, key).fallbacks or row(model, key).calls for key in FUSED)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=note)
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert len(graphs) == 2, "layers that are alike are compiled once"
    unkernelize(model)
    torch.compiler.reset()
