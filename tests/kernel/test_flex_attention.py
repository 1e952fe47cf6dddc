"""Boolean masks by flex attention: the same results, fewer blocks; for which calls; what is kept of a mask.

On a CPU it has no backward; ``benchmarks.attention`` compares gradients before it measures.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from tests.support.attention import CASES, call, module_for
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.sdpa_attention import flex
from twinkle.kernel.ops.sdpa_attention import torch as backend
from twinkle.kernel.ops.sdpa_attention.inputs import Inputs
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

BY_FLEX, FUSED = backend.attention_by(flex.can), backend.attention_by(lambda given, dropout: False)
MODULE = types.SimpleNamespace(is_causal=True)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    """And no program of other tests: a process has room for eight."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def window(length: int, width: int) -> torch.Tensor:
    at = torch.arange(length)
    return ((at[:, None] >= at) & (at[:, None] - at < width))[None, None]


def given(mask: Any, dtype: torch.dtype = torch.float32, groups: int = 2, width: int = 32, values: int = 0) -> Inputs:
    batch, _, length, keys = mask.shape
    query = torch.randn(batch, 4, length, width).to(dtype)
    key = torch.randn(batch, 4 // groups, keys, width).to(dtype)
    value = torch.randn(batch, 4 // groups, keys, values or width).to(dtype)
    return Inputs(query, key, value, mask, causal=False, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_call_with_a_boolean_mask(dtype: torch.dtype) -> None:
    served = 0
    for case in CASES:
        tensors, options = call(case, dtype, "cpu")
        found, expected = (function(module_for(case), *tensors, **options)[0] for function in (BY_FLEX, FUSED))
        mask = options["attention_mask"]
        served += mask is not None and mask in flex._blocks
        accuracy = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found, expected, **accuracy, msg=lambda text, case=case: f"{case}: {text}")
    kinds = ("boolean", "sliding", "one for all texts", "rows without keys")
    assert served == sum(case.mask in kinds and case.lengths[0] > 1 for case in CASES)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "keys"), [(128, 128), (130, 130), (300, 257), (128, 400)])
def test_lengths_that_fill_no_block_and_blocks_of_every_kind(length: int, keys: int, groups: int) -> None:
    """Nothing, all or something is kept of a block; rows without keys among them."""
    mask = torch.rand(2, 1, length, keys) < 0.02
    mask[..., :128] |= torch.rand(2, 1, length, 1) < 0.9
    mask[0, :, :128, :128], mask[1, :, 120:], mask[:, :, 5:9] = True, False, False
    inputs = given(mask, groups=groups, values=24)
    torch.testing.assert_close(flex.attention(inputs), backend.fused(inputs, 0.0))


def test_a_mask_for_each_head() -> None:
    inputs = given(torch.rand(2, 4, 140, 140) < 0.3)
    torch.testing.assert_close(flex.attention(inputs), backend.fused(inputs, 0.0))


def test_blocks_without_a_key_are_not_computed() -> None:
    """Of a window in a long text nearly all."""
    blocks = flex.blocks_of(window(2048, 100)).template
    computed = blocks.kv_num_blocks + blocks.full_kv_num_blocks
    assert computed.flatten().tolist() == [1] + 15 * [2] and int(blocks.full_kv_num_blocks.sum()) == 0
    wide = flex.blocks_of(window(2048, 1024)).template
    assert wide.full_kv_num_blocks.flatten().tolist()[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 7]


def test_what_is_known_of_a_mask_is_for_all_layers_and_dies_with_it() -> None:
    gc.collect()
    before, mask = len(flex._blocks), window(256, 10)
    known = flex.blocks_of(mask)
    assert flex.blocks_of(mask) is known and len(flex._blocks) == before + 1
    flex.attention(given(mask))
    mask[..., 200:] = False
    changed = flex.blocks_of(mask)
    assert known.empty is None and changed.empty is not None and changed.empty.sum() > 0
    torch.testing.assert_close(flex.attention(inputs := given(mask)), backend.fused(inputs, 0.0))
    del mask, known, changed, inputs
    gc.collect()
    assert len(flex._blocks) == before


def test_a_mask_whose_changes_nobody_counts_is_looked_at_anew() -> None:
    with torch.inference_mode():
        mask = window(256, 10)
        known = flex.blocks_of(mask)
        mask[..., 200:] = False
        assert known.empty is None and flex.blocks_of(mask).empty is not None


class Subclass(torch.Tensor):
    """Somebody's."""


MASK = window(64, 8)


@pytest.mark.parametrize(
    ("inputs", "dropout"),
    [
        (given(MASK)._replace(mask=None), 0.0),
        (given(MASK)._replace(mask=MASK.float()), 0.0),
        (given(MASK)._replace(mask=MASK[:, :, -1:]), 0.0),
        (given(MASK), 0.1),
        (given(MASK, width=8), 0.0),
        (given(MASK, width=264), 0.0),
        (given(MASK, values=8), 0.0),
        (given(MASK)._replace(query=torch.randn(1, 4, 64, 32).half()), 0.0),
        (given(MASK)._replace(value=torch.randn(1, 2, 64, 32, requires_grad=True)), 0.0),
        (given(MASK)._replace(mask=MASK.as_subclass(Subclass)), 0.0),
    ],
)
def test_calls_that_are_not_for_it(inputs: Inputs, dropout: float) -> None:
    assert flex.can(given(MASK), 0.0) and not flex.can(inputs, dropout)


def test_surroundings_that_are_not_for_it() -> None:
    inputs = given(MASK)
    with torch.autocast("cpu", torch.bfloat16):
        assert not flex.can(inputs, 0.0)
    seen = []
    torch.func.vmap(lambda x: seen.append(flex.can(inputs, 0.0)) or x)(torch.ones(2))
    assert seen == [False]
    assert torch.compile(lambda x: x if flex.can(inputs, 0.0) else -x, backend="eager")(torch.ones(())) == -1


def test_under_a_mode_that_sees_every_operator() -> None:
    """Nothing is compiled there, unless it is selective checkpointing's."""
    inputs = given(window(256, 10))
    with FlopCounterMode(display=False):
        out = BY_FLEX(MODULE, *inputs[:4])[0]
    torch.testing.assert_close(out, FUSED(MODULE, *inputs[:4])[0])
    first, second = create_selective_checkpoint_contexts(lambda *given, **options: CheckpointPolicy.MUST_RECOMPUTE)
    for mode in (first, second):
        with mode:
            assert flex.can(inputs, 0.0)


def test_it_serves_from_the_measured_length_in_measured_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short, full = window(500, 9), window(499, 9), torch.ones(1, 1, 500, 500, dtype=torch.bool)
    assert not flex.pays(given(long, torch.bfloat16), 0.0), "nothing says so for a CPU"
    monkeypatch.setitem(flex.QUERIES, "cpu", 500)
    served: list[torch.Tensor] = []
    attention = flex.attention
    monkeypatch.setattr(flex, "attention", lambda given: served.append(given.mask) or attention(given))
    wide, narrow = torch.float32, torch.bfloat16
    for mask, dtype, expected in ((long, narrow, 1), (short, narrow, 0), (full, narrow, 0), (long, wide, 0)):
        inputs = given(mask, dtype)
        assert flex.pays(inputs, 0.0) is bool(expected)
        backend.load(None)(MODULE, *inputs[:4])
        assert len(served) == expected
        served.clear()


def test_more_programs_than_a_compiler_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's other function takes the call."""
    with torch._dynamo.config.patch(recompile_limit=1):
        assert flex.attention(given(window(128, 9))) is not None
        inputs = given(window(128, 9), torch.bfloat16, groups=1)
        assert flex.attention(inputs) is None
        torch.testing.assert_close(BY_FLEX(MODULE, *inputs[:4]), FUSED(MODULE, *inputs[:4]))


@pytest.mark.parametrize(("name", "kinds"), [("mistral", 1), ("gemma3", 2)])
def test_in_a_model_with_windows_and_packed_documents(name: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = presets.build(name, attn_implementation="sdpa", dtype=torch.bfloat16).eval()
    ids, positions = torch.arange(5, 55)[None], torch.cat((torch.arange(20), torch.arange(30)))[None]
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    served: list[torch.Tensor] = []
    attention = flex.attention
    monkeypatch.setattr(flex, "attention", lambda given: served.append(given.mask) or attention(given))
    monkeypatch.setitem(flex.QUERIES, "cpu", 1)
    monkeypatch.setattr(flex, "SKIPPED", 0.0)  # these are too short to skip any
    kernelize(model, {"sdpa": KernelChoice("sdpa_attention", ("torch",))})
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    row = report(model).row("sdpa")
    assert row.calls == row.instances == len(served) and row.fallbacks == {}
    assert len({id(mask) for mask in served}) == kinds, "layers of a kind share a mask"
    unkernelize(model)
    assert (found - expected).norm() <= 2e-2 * expected.norm()
