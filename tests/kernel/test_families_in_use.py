"""Every family in the situations that models are used in: copied, saved, adapted, compiled, hooked, in parallel.

Each time what a kernelized model gives is what the original gives in the same situation, the kernels run, and undo
brings back what was there.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support.models import assert_close, clean_process, differences, look, mapping, step  # noqa: F401
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.slow

FAMILIES = sorted(presets.PRESETS)


def build(name: str) -> nn.Module:
    model = presets.build(name)
    model(**presets.inputs(model))  # transformers notes some things on its modules then
    return model


def saved(model: nn.Module) -> io.BytesIO | None:
    """The pickled model; None for one with a local class or function of transformers in it, which no pickle takes."""
    file = io.BytesIO()
    try:
        torch.save(model, file)
    except AttributeError as error:
        assert "Can't pickle local object" in str(error)
        return None
    file.seek(0)
    return file


def called(model: nn.Module) -> int:
    return sum(row.calls for row in report(model).rows)


def in_training(model: nn.Module) -> nn.Module:
    """In training mode without dropout, so that a second run gives the same."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


# --- copies and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_copied_saved_and_switched(name: str) -> None:
    original = build(name)
    expected, before = step(original), look(original)
    can_be_saved = saved(original) is not None
    model = kernelize(original, mapping("loopback"))
    twin = copy.deepcopy(model)
    calls = called(twin)
    assert_close(step(twin), expected)
    assert called(twin) > calls
    file = saved(model)
    assert (file is not None) is can_be_saved
    if file is not None:
        loaded = torch.load(file, weights_only=False)
        assert report(loaded).rows == []
        assert_close(step(loaded), expected)
    model.train()
    model.eval()
    assert_close(step(model), expected)
    assert unkernelize(twin).not_undone == () and unkernelize(model).not_undone == ()
    assert differences(before, look(model)) == []


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed(name: str) -> None:
    original = in_training(build(name))
    if original.supports_gradient_checkpointing:
        original.gradient_checkpointing_enable()
    torch.manual_seed(0)
    expected = step(original)
    model = kernelize(original, mapping("loopback"))
    torch.manual_seed(0)
    assert_close(step(model), expected)
    assert called(model) > 0
    assert unkernelize(model).not_undone == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_under_autocast(name: str) -> None:
    """It runs, in the same dtypes; how exact it is in bf16 is judged elsewhere."""
    original = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(original)
        model = kernelize(original, mapping("loopback"))
        ours = step(model)
    assert {key: (t.shape, t.dtype) for key, t in ours.items()} == {
        key: (t.shape, t.dtype) for key, t in expected.items()
    }
    assert all(t.isfinite().all() for t in ours.values())
    assert called(model) > 0
    assert unkernelize(model).not_undone == ()


def lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    # Not routers and the like, which derive from Linear and return more than a tensor.
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=linear, init_lora_weights=False)).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_with_adapters_before_and_after(name: str) -> None:
    original = build(name)
    expected = step(lora(copy.deepcopy(original)))
    before = look(original)
    for adapt_first in (True, False):
        model = copy.deepcopy(original)
        if adapt_first:
            adapted = kernelize(lora(model), mapping("loopback"))
        else:
            adapted = lora(kernelize(model, mapping("loopback")))
        ours = step(adapted)
        assert list(ours) == list(expected)
        assert_close(ours, expected)
        assert called(adapted) > 0
        assert unkernelize(adapted).not_undone == ()
    assert differences(before, look(original)) == []


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_with_accelerates_hooks(name: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    def hooked(model: nn.Module) -> nn.Module:
        for module in list(model.modules())[1:]:
            if not list(module.children()):
                hooks.add_hook_to_module(module, hooks.ModelHook())
        return model

    original = build(name)
    expected = step(original)
    for hooks_first in (True, False):
        model = copy.deepcopy(original)
        if hooks_first:
            kernelize(hooked(model), mapping("loopback"))
        else:
            hooked(kernelize(model, mapping("loopback")))
        assert_close(step(model), expected)
        assert called(model) > 0
        hooks.remove_hook_from_module(model, recurse=True)
        assert unkernelize(model).not_undone == ()
        assert_close(step(model), expected)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FAMILIES)
def test_in_data_parallel(name: str, process_group: None) -> None:
    original = build(name)
    expected, before = step(original), look(original)
    inputs = presets.inputs(original)
    model = kernelize(original, mapping("loopback"))
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ours = step(parallel, inputs)
    assert_close({key.removeprefix("module."): t for key, t in ours.items()}, expected)
    assert called(parallel) > 0
    assert unkernelize(parallel).not_undone == ()
    assert differences(before, look(model)) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_whole(name: str) -> None:
    """Where the original is one graph, so is the kernelized model, and it gives the same."""
    original = build(name)
    inputs = presets.inputs(original)

    def compiled(model: nn.Module, fullgraph: bool) -> dict[str, torch.Tensor] | None:
        """None where it can't be: transformers' own code of some families can't."""
        torch.compiler.reset()
        try:
            results = step(torch.compile(model, fullgraph=fullgraph, backend="aot_eager"), inputs)
        except Exception:  # of many kinds
            return None
        return {name.removeprefix("_orig_mod."): tensor for name, tensor in results.items()}

    for fullgraph in (True, False):  # without breaks it would be the same graph once more
        if (theirs := compiled(original, fullgraph)) is not None:
            break
    if theirs is not None:
        model = kernelize(original, mapping("loopback"))
        ours = compiled(model, fullgraph)
        assert ours is not None
        assert_close(ours, theirs)
        assert any(row.counts.compiled for row in report(model).rows)
        assert unkernelize(model).not_undone == ()
    torch.compiler.reset()
