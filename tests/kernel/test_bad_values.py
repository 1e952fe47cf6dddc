"""Replacements of the wrong kind, or with another signature: an error that names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.refusals import refused
from tests.support.snapshots import bits
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
NORM, NORM_FORWARD, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3RMSNorm.forward", f"{QWEN3}.apply_rotary_pos_emb"

pytestmark = pytest.mark.usefixtures("loopback")


@pytest.fixture(scope="module")
def qwen3() -> nn.Module:
    return presets.build("qwen3")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ["got None", "a KernelChoice, a class, a function or hub(…)"]),
        (3, ["got int 3"]),
        ("liger", ["got 'liger'", "a KernelChoice"]),
        (("npu", "liger"), ["got tuple ('npu', 'liger')"]),
        ({"op": "rms_norm"}, ["got dict"]),
    ],
)
def test_a_value_of_no_kind(qwen3: nn.Module, value: Any, words: list[str]) -> None:
    refused(qwen3, {f"{QWEN3}.Qwen3RMSNorm": value}, f"{QWEN3}.Qwen3RMSNorm", *words)
    refused(qwen3, {modeling_qwen3.Qwen3RMSNorm: value}, "Qwen3RMSNorm", *words)


class SameInit(modeling_qwen3.Qwen3RMSNorm):
    """A subclass of the target may have an __init__: the instances are built already."""

    def __init__(self) -> None:
        raise AssertionError("never runs")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


class OwnInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bonus = 1

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.bonus


class OwnHelper(nn.Module):
    def _helper(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._helper(hidden_states)


class UsesSuper(modeling_qwen3.Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


class HelpedSubclass(modeling_qwen3.Qwen3RMSNorm):
    def halve(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.halve(hidden_states)


class NoForward(nn.Module):
    pass


class NoLayer:
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def identity(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (NORM_FORWARD, NoLayer, ["NoLayer is a class but no nn.Module"]),
        (NORM, NoLayer, ["NoLayer is a class but no nn.Module"]),
        (NORM, dict, ["builtins.dict is a class but no nn.Module"]),
        (NORM, identity, ["identity is a function, the target is a class", f"map {NORM_FORWARD}, or give a class"]),
        (ROTARY, modeling_qwen3.Qwen3RMSNorm, ["Qwen3RMSNorm is a class, the target is a function: give a function"]),
        (NORM, OwnInit, ["OwnInit has an __init__ of its own", "derive it from Qwen3RMSNorm"]),
        (NORM_FORWARD, OwnInit, ["OwnInit has an __init__ of its own"]),
        (NORM, OwnHelper, ["OwnHelper", "_helper", "derive it from Qwen3RMSNorm"]),
        (NORM_FORWARD, UsesSuper, ["UsesSuper.forward uses super()", "map the class"]),
        (NORM_FORWARD, HelpedSubclass, ["HelpedSubclass has members besides forward", "halve", "map the class"]),
        (NORM, NoForward, ["NoForward has no method forward of its own"]),
        (NORM, toys.ToyNorm(4), ["got an instance of ToyNorm; give the class itself"]),
        (NORM_FORWARD, toys.ToyNorm(4), ["got an instance of ToyNorm; give the class itself"]),
    ],
)
def test_a_value_that_does_not_fit_the_kind_of_target(qwen3: nn.Module, key: str, value: Any, words: list[str]) -> None:
    refused(qwen3, {key: value}, key, *words)


@pytest.mark.parametrize("subclass", [SameInit, UsesSuper, HelpedSubclass])
def test_a_subclass_of_the_target_may_have_whatever_it_likes(qwen3: nn.Module, subclass: type[nn.Module]) -> None:
    kernelize(qwen3, {NORM: subclass})
    assert report(qwen3).row("Qwen3RMSNorm").state == "installed"
    bits(qwen3, **presets.inputs(qwen3))
    unkernelize(qwen3)


def rope(order: str) -> Callable[..., Any]:
    """A rotary function with these parameters, that must never be called."""
    namespace: dict[str, Any] = {}
    exec(f"def other_rope({order}):\n    raise AssertionError('called')", namespace)
    return namespace["other_rope"]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("k, q, cos, sin, unsqueeze_dim=1", ["the kernel has 'q' at another position"]),
        ("q, k, sin, cos, unsqueeze_dim=1", ["the kernel has 'cos' at another position"]),
        ("q, k, cos, sin", ["the kernel has no parameter 'unsqueeze_dim'"]),
        ("q, k, cos, sin, unsqueeze_dim", ["the kernel needs 'unsqueeze_dim', which the original has a default for"]),
        ("q, k, cos, sin, unsqueeze_dim=2", ["'unsqueeze_dim' is 2 by default, 1 in the original"]),
        ("q, k, cos, sin, unsqueeze_dim=1, *, layout", ["needs layout", "the original is not called with"]),
        ("q, k, cos, sin, extra, unsqueeze_dim=1", ["'unsqueeze_dim' at another position"]),
        ("q, k, /, cos, sin, unsqueeze_dim=1", ["takes 'q' only by position"]),
        ("q, k, cos, sin, *, unsqueeze_dim=1", ["takes 'unsqueeze_dim' only by name"]),
        ("", ["has no parameter 'q'"]),
    ],
)
def test_a_function_with_another_signature(qwen3: nn.Module, parameters: str, words: list[str]) -> None:
    refused(qwen3, {ROTARY: rope(parameters)}, ROTARY, *words)


def test_other_names_and_more_parameters_with_defaults_will_do(qwen3: nn.Module) -> None:
    given = []

    def mine(query, key, c, s, dim=1, *, layout="bhsd"):  # type: ignore[no-untyped-def]
        given.append((dim, layout))
        return query, key

    kernelize(qwen3, {ROTARY: mine})
    q = torch.zeros(1, 1, 2, 4)
    assert modeling_qwen3.apply_rotary_pos_emb(q, k=q, cos=None, sin=None, unsqueeze_dim=5)[0] is q
    assert modeling_qwen3.apply_rotary_pos_emb(q, q, None, sin=None)[0] is q
    assert given[-2:] == [(5, "bhsd"), (1, "bhsd")]
    unkernelize(qwen3)


def keywords_layer(parameters: str) -> type[nn.Module]:
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, {parameters}):\n    return x", namespace)
    return type("Layer", (nn.Module,), {"forward": namespace["forward"]})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("x, scale=2.0, *, shift=0.0", ["the original takes **kwargs, which the kernel would ignore"]),
        ("x, scale=2.0, **kwargs", None),
        ("x, *args, **kwargs", None),
        ("x, scale=2.0, *, shift=1.0, **kwargs", ["'shift' is 1.0 by default, 0.0 in the original"]),
        ("x, scale=2.0, *, shift, **kwargs", ["needs 'shift', which the original has a default for"]),
        ("x, **kwargs", ["has no parameter 'scale'"]),
    ],
)
def test_a_layer_whose_original_takes_keywords(parameters: str, words: list[str] | None) -> None:
    model = nn.Sequential(toys.WithKeywords())
    mapping = {toys.WithKeywords: keywords_layer(parameters)}
    if words:
        refused(model, mapping, *words)
        assert type(model[0]) is toys.WithKeywords
    else:
        kernelize(model, mapping)
        assert report(model).rows[0].state == "installed"
        model[0](torch.ones(1), scale=3.0, shift=1.0, more=2.0)
        unkernelize(model)
