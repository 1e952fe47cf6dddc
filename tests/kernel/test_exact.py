"""The fp64 reference is one: nothing in a model's forward, loss or backward narrows it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from twinkle import presets
from twinkle.kernel import verify
from twinkle.kernel.exact import KeepFloat64, by_pytorch_alone, exact_copy, exact_inputs, exactly
from twinkle.kernel.verify import compare_models

THIRD = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
NARROW = torch.tensor(1.0)

CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to dtype": lambda x: x.to(torch.float32),
    "to dtype by name": lambda x: x.to(dtype=torch.bfloat16),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to another": lambda x: x.to(NARROW),
    "to another by name": lambda x: x.to(tensor=NARROW),
    "type_as": lambda x: x.type_as(NARROW),
    "type_as by name": lambda x: x.type_as(other=NARROW),
    "type": lambda x: x.type(torch.float16),
    "softmax, by name": lambda x: F.softmax(x, dim=-1, dtype=torch.float32).mul(0).add(THIRD),
    "softmax, by position": lambda x: torch.softmax(x, -1, torch.float32).mul(0).add(THIRD),
    "sum": lambda x: x.sum(dtype=torch.float32) * x,
    "copied into": lambda x: torch.empty_like(x, dtype=torch.float32).copy_(x),
    "made and written": lambda x: torch.zeros(2, dtype=torch.bfloat16).add_(x),
    "new": lambda x: x.new_zeros(2, dtype=torch.float32).add_(x),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.float()).to(torch.complex64)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_no_cast_narrows(cast: str) -> None:
    with KeepFloat64():
        result = CASTS[cast](THIRD)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, THIRD, rtol=1e-15, atol=0)


def test_what_is_no_narrowing_is_done() -> None:
    with KeepFloat64():
        assert THIRD.to(torch.int64).tolist() == [0, 0] and THIRD.to(torch.tensor(1)).dtype == torch.int64
        assert THIRD.to(torch.float64) is THIRD and (THIRD > 0.5).dtype == torch.bool
        # What meets a matrix product must have one dtype, integers that become floating-point among it.
        assert torch.arange(2).float().dtype == torch.arange(2).to(torch.float32).dtype == torch.float64
        bits = torch.tensor([1.0], dtype=torch.float64).view(torch.int64)
        assert torch.ones(1, dtype=torch.int32).view(torch.float32).dtype == torch.float32 and bits.item() > 1
    assert THIRD.float().dtype == torch.float32


def exact_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The formula, written out; the weights are the module's."""
    return module.weight * x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


def test_a_norm_of_transformers_is_exact() -> None:
    norm = exact_copy(presets.build("qwen3").model.norm)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (norm(x) - exact_norm(norm, x)).abs().max()
    assert 1e-9 < error < 1e-5, "cast to fp64, but computed in fp32"
    with KeepFloat64():
        assert (norm(x) - exact_norm(norm, x)).abs().max() < 1e-14


def test_a_whole_model_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one whose norms are written out in fp64, and whose loss is."""
    model = presets.build("qwen3")
    inputs = exact_inputs(presets.inputs(model))
    exact = exact_copy(model)
    with KeepFloat64():
        ours = verify._train_step(exact, inputs, presets.loss, verify._named_outputs)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", exact_norm)

    def loss(outputs: Any) -> torch.Tensor:
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        return F.cross_entropy(logits, labels)

    class DoubledIntegers(TorchFunctionMode):
        """The rotary embedding casts positions to fp32, which is exact, and multiplies them by frequencies in fp64."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            doubling = func is torch.Tensor.float and args[0].dtype in (torch.int64, torch.float64)
            return args[0].double() if doubling else func(*args, **(kwargs or {}))

    with DoubledIntegers():
        theirs = verify._train_step(exact, inputs, loss, verify._named_outputs)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype == torch.float64
        assert (ours[name] - tensor).norm() <= 1e-12 * tensor.norm(), name


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_family_runs_exactly(name: str) -> None:
    """The results have more digits than fp32 has."""
    model = presets.build(name)
    inputs = presets.inputs(model)
    with exactly(model):
        exact = verify._train_step(exact_copy(model), exact_inputs(inputs), presets.loss, verify._named_outputs)
    assert {tensor.dtype for tensor in exact.values()} == {torch.float64}
    assert all(not torch.equal(t.float().double(), t) for t in exact.values() if t.numel() > 8 and t.abs().max() > 0)


def test_comparisons_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An original in fp64 that is computed in fp32 is off, so a kernel that is exact uses next to nothing."""
    norm = presets.build("qwen3").model.norm.double()

    class Model(nn.Module):
        def __init__(self, forward: Any) -> None:
            super().__init__()
            self.norm, self.run = copy.deepcopy(norm), forward

        def forward(self, x: torch.Tensor) -> Any:
            return type("Outputs", (), {"logits": self.run(self.norm, x)})

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    original, ours = Model(lambda norm, x: norm(x)), Model(exact_norm)
    used = [c.used for c in compare_models(original, ours, {"x": x}, lambda outputs: outputs.logits.square().sum())]
    assert len(used) == 2 and max(used) < 1e-5


def test_so_does_the_command_that_looks_for_comparable_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.overrides import _get_current_function_mode_stack

    from twinkle.commands import comparison as command

    runs, chosen_experts = set(), command._chosen_experts

    def noted(model: nn.Module, inputs: Any) -> Any:
        exactly = any(isinstance(mode, KeepFloat64) for mode in _get_current_function_mode_stack())
        runs.add((next(model.parameters()).dtype, exactly))
        return chosen_experts(model, inputs)

    monkeypatch.setattr(command, "_chosen_experts", noted)
    model = presets.build("qwen3_moe")
    assert next(command.comparable_inputs(model, model)).keys() == {"input_ids", "labels"}
    assert runs == {(torch.float32, False), (torch.float64, True)}


MODELING = """
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

@use_kernel_func_from_hub_with_fallback("sqrt", "math")
def root(x):
    return torch.sqrt(x)

class Root(nn.Module):
    def forward(self, x):
        return root(x=x)

def _failing():
    try:
        raise ValueError
    except ValueError as error:
        def wrapped():
            return error
    return wrapped

failing, scripted = _failing(), torch.jit.script(nn.Linear(1, 1))
"""


def modeling(name: str, code: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    exec(code, vars(module))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_judge_goes_by_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model's code is inherited from another file, and where its own is that of no module known."""
    file = modeling("modeling_root", MODELING)
    monkeypatch.setitem(sys.modules, "modeling_root", file)
    elsewhere = modeling("not_in_sys_modules", "class Mine(Root):\n    pass", Root=file.Root)
    model, x, before = elsewhere.Mine(), torch.tensor([4.0, 9.0]), dict(vars(file))
    with pytest.raises(TypeError, match="math.sqrt"):
        model(x)
    with pytest.raises(KeyError), by_pytorch_alone(model):
        with by_pytorch_alone(model):
            assert model(x).tolist() == [2.0, 3.0]
        assert model(x).tolist() == [2.0, 3.0]
        raise KeyError
    assert vars(file) == before
