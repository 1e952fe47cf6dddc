"""The class of a kernelized module, asked as a class: it answers for the original."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from torch.nn.utils import parametrize

from tests.support import lookalikes as like
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.reclass import installed_on
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

CHOICE = KernelChoice("rms_norm", ("loopback",))
pytestmark = pytest.mark.usefixtures("loopback")


class Metaclass(abc.ABCMeta):
    """One that has its own say about what is made by a call."""

    made: int = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.made += 1
        return super().__call__(*args, **kwargs)


class Abstract(like.Norm, abc.ABC):
    """Has a metaclass, and asks its subclasses who is one."""


class Counting(like.Norm, metaclass=Metaclass):
    pass


class CopiesItself(like.Norm):
    """By calling its class."""

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        return twin


CLASSES = (like.Norm, Abstract, Counting, CopiesItself)


def kernelized(cls: Any) -> Any:
    return kernelize(cls(), {cls: CHOICE}, strict=True)


def test_what_the_class_makes_computes_by_itself() -> None:
    """One instance's kernel knows no weight; another has one."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    norm = kernelize(Gemma4RMSNorm(16, with_scale=False), {Gemma4RMSNorm: CHOICE}, strict=True)
    made = type(norm)(16)
    with torch.no_grad():
        made.weight.fill_(3)
    x = torch.randn(2, 16)
    torch.testing.assert_close(made(x), 3 * norm(x))
    assert type(made) is Gemma4RMSNorm and report(norm).rows[0].calls == 1
    unkernelize(norm)


def test_a_model_is_loaded_by_the_class_of_another(tmp_path: Path) -> None:
    model = presets.build("qwen3")
    cls = type(model)
    kernelize(model, {"transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": CHOICE})
    model.save_pretrained(tmp_path)
    loaded, made = type(model).from_pretrained(tmp_path), type(model)(model.config)
    inputs = presets.inputs(model)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    for other in (loaded, made):
        assert type(other) is cls and report(other).rows == []
        assert not any(installed_on(type(module)) for module in other.modules())
    assert report(model).rows[0].calls == 9
    unkernelize(model)


@pytest.mark.parametrize("cls", CLASSES)
def test_it_is_called_as_the_original(cls: Any) -> None:
    module, before = kernelized(cls), getattr(cls, "made", 0)
    generated = type(module)
    assert generated is not cls and inspect.signature(generated) == inspect.signature(cls)
    assert type(generated()) is cls and getattr(cls, "made", 0) == before + (cls is Counting)
    assert callable(module) and module.__call__.__func__ is nn.Module.__call__
    unkernelize(module)
    assert type(module) is cls


@pytest.mark.parametrize("cls", CLASSES)
def test_who_is_an_instance(cls: Any) -> None:
    module, other = kernelized(cls), cls()
    further = kernelized(cls)
    generated = type(module)
    assert type(further) is not generated
    for known in (generated, cls, nn.Module):
        assert isinstance(module, known) and isinstance(other, known) and isinstance(further, known)
        assert issubclass(generated, known) and issubclass(cls, generated)
    unrelated = like.MLP()
    assert not isinstance(unrelated, generated) and not isinstance(unrelated, cls) and not issubclass(like.MLP, cls)
    for each in (module, further):
        unkernelize(each)


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_keep_the_kernel_and_pickles_the_original(cls: Any) -> None:
    module, x = kernelized(cls), torch.randn(2, like.WIDTH)
    expected = module(x)
    copies = [copy.copy(module), copy.deepcopy(module), module._replicate_for_data_parallel()]
    assert all(type(made).forward is type(module).forward for made in copies)
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded) is cls
    assert all(torch.equal(made(x), expected) for made in (*copies[:2], loaded))
    for each in (module, *copies):
        unkernelize(each)


def test_a_class_that_torch_derives_from_it() -> None:
    cls: Any = like.Norm
    module, x = kernelized(cls), torch.randn(2, like.WIDTH)
    parametrize.register_parametrization(module, "weight", nn.Softplus())
    assert type(module).__name__ == f"Parametrized{cls.__name__}" and type(type(module)()) is cls
    expected = module(x)
    unkernelize(module)
    assert type(module).__bases__ == (cls,) and type(type(module)) is type(cls)
    assert torch.equal(module(x), expected)
    parametrize.remove_parametrizations(module, "weight")
    assert type(module) is cls


def test_a_class_of_somebodys_own_derived_from_it() -> None:
    module = kernelized(like.Norm)

    class Mine(type(module)):  # type: ignore[misc]
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

    assert type(Mine(2.0)) is Mine and list(inspect.signature(Mine).parameters) == ["factor"]
    assert isinstance(Mine(2.0), Mine) and not isinstance(module, Mine)
    unkernelize(module)


def test_a_policy_that_takes_the_first_layers_class_finds_all_layers() -> None:
    """One layer has a forward of its own and keeps it, so its class is another; accelerate wraps by the first one's."""
    find = pytest.importorskip("accelerate.utils.dataclasses").get_module_class_from_name
    for odd in (0, 2):
        model = presets.build("qwen3", num_hidden_layers=3)
        layer = model.model.layers[odd]
        layer.forward = lambda *args, _forward=layer.forward, **kwargs: _forward(*args, **kwargs)
        kernelize(model, {"fused_add_norm": KernelChoice("add_rms_norm", ("loopback",))})
        assert len({type(layer) for layer in model.model.layers}) == 2
        cls = find(model, "Qwen3DecoderLayer")
        assert [isinstance(layer, cls) for layer in model.model.layers] == [True] * 3
        unkernelize(model)


class AsksForClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([like.Norm(), like.Norm()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        for norm in self.norms:
            x = norm(x)
        return x + 1 if isinstance(first, type(second)) and isinstance(second, like.Norm) else x


def test_compiled_code_may_ask() -> None:
    model, x = AsksForClasses(), torch.randn(2, like.WIDTH)
    expected = model(x)
    kernelize(model.norms[0], {like.Norm: CHOICE}, strict=True)
    kernelize(model, {like.Norm: CHOICE}, strict=True)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    unkernelize(model)
