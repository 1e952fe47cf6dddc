"""Kernelized models under ``torch.compile``: one graph, the numbers of eager, and no stale graph after a change.

A compiled graph has the kernels of the moment in which it was made. What kernelize and undo change, the classes of
modules and a modeling file's functions, is among what the compiler guards on, so the next call compiles anew.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import _dynamo as dynamo
from torch._dynamo.utils import counters

from tests.support.models import (
    assert_close,
    clean_process,  # noqa: F401
    installed,
    mapping,
    rows_of,
    same_bits,
    step,
)
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    dynamo.reset()
    counters.clear()
    yield
    dynamo.reset()


def build(preset):
    # The default for experts on a CPU, grouped_mm, has a backward that can't be compiled, with or without us.
    moe = {"mlp_only_layers": [], "experts_implementation": "batched_mm"} if preset.endswith("moe") else {}
    return presets.build(preset, num_hidden_layers=1, **moe)


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def graphs():
    return counters["stats"]["unique_graphs"]


def bits(results):
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in results.items()}


@pytest.mark.parametrize("preset", ["llama", "qwen3", "gemma3", "qwen3_moe", "phi3"])
def test_compiled_equals_eager(preset):
    model = build(preset)
    original = step(model)
    kernelize(model, mapping("loopback", f"{preset}."))
    eager = step(model)
    counted = {target: row.calls for target, row in rows_of(model).items()}
    assert all(counted.values()) and "compiled: not counted" not in report(model).table()

    for row in rows_of(model).values():
        row.counts.kernel = 0
    run = compiled(model)
    assert_close(bits(step(run)), eager)
    assert graphs() == 1
    found = {target: (row.calls, row.counts.compiled) for target, row in rows_of(run).items()}
    assert found == dict.fromkeys(counted, (0, True))
    assert report(model).table().count("compiled: not counted") == len(counted)

    with dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            step(model)  # eager calls in between, which count
            assert_close(bits(step(run)), eager)
    assert {target: row.calls for target, row in rows_of(model).items()} == {t: 2 * n for t, n in counted.items()}

    unkernelize(model)
    assert_close(bits(step(run)), original)
    assert graphs() == 2
    with dynamo.config.patch(error_on_recompile=True):
        step(run)


def test_kernelize_and_undo_reach_a_model_that_is_compiled_already():
    model = build("llama")
    run = compiled(model)
    original = bits(step(run))
    kernelize(run, mapping("loopback", "llama."))
    assert set(installed(model)) == {"llama.LlamaRMSNorm", "llama.LlamaMLP.forward", "llama.apply_rotary_pos_emb"}
    assert_close(bits(step(run)), step(model))
    assert all(row.counts.compiled for row in rows_of(model).values())
    kernelize(model, mapping("refuse", "LlamaMLP.forward"))
    assert_close(bits(step(run)), step(model))
    unkernelize(run)
    assert same_bits(step(model), step(build("llama")))
    before = graphs()
    assert_close(bits(step(run)), original)
    assert graphs() <= before + 1  # at most one: the graph of the beginning may fit again


def test_as_many_graphs_as_without_us():
    found = []
    for kernels in (False, True):
        dynamo.reset()
        counters.clear()
        model = build("llama")
        if kernels:
            kernelize(model, mapping("loopback", "llama."))
        run = compiled(model)
        with torch.no_grad():
            for length in (8, 12, 20):
                run(**presets.inputs(model, length=length))
        found.append(graphs())
        unkernelize(model)
    assert found[0] == found[1] <= 2


def test_a_kernel_that_leaves_calls_to_the_original_is_traced_on_both_ways():
    """``accepts_call`` is asked while tracing, too."""
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaMLP

    class ShortOnly(nn.Module):
        def forward(self, x):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

        @staticmethod
        def accepts_call(self, x):
            return None if x.shape[1] < 10 else "too long"

    model = build("llama")
    short, long = presets.inputs(model, length=8), presets.inputs(model, length=16)
    expected = [step(model, inputs) for inputs in (short, long)]
    kernelize(model, {f"{LlamaMLP.__module__}.LlamaMLP.forward": ShortOnly})
    run = compiled(model)
    for inputs, theirs in zip((short, long), expected, strict=True):
        assert_close(bits(step(run, inputs)), theirs)
        assert_close(step(model, inputs), theirs)
    row = rows_of(model)["llama.LlamaMLP.forward"]
    assert row.calls == 1 and row.fallbacks == {"too long": 1} and row.counts.compiled
    unkernelize(model)
