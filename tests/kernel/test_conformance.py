"""What ``twinkle-kernel verify --op`` finds out about a backend, of every op that has a reference, ours or not."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.kernel import KernelChoice, conformance, kernelize, registry
from twinkle.kernel.ops.derived import Example, reference_impl
from twinkle.kernel.registry import KernelImpl
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("own_registry")

CPU = torch.device("cpu")
OPS = {
    "add_rms_norm": (),
    "causal_lm_loss": (),
    "gated_rms_norm": ("qwen3_next",),
    "geglu": ("gemma",),
    "moe_block": ("qwen3_moe",),
    "moe_experts": ("qwen3_moe",),
    "moe_router": ("qwen3_moe",),
    "multimodal_rotary": (),
    "qk_norm_rotary": (),
    "rms_norm": ("llama",),
    "rotary": ("llama",),
    "sdpa_attention": (),
    "swiglu": ("llama",),
}
"""Every op that has a reference, and presets in which it is met."""


def test_every_op_with_a_reference_is_looked_at() -> None:
    assert OPS.keys() == {name for name, op in registry.ops().items() if op.reference}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "DTYPES", (torch.float32,))
    monkeypatch.setattr(conformance, "SCALES", (1.0,))


def problems(op: str, impl: KernelImpl, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with a backend, which must have been run."""
    monkeypatch.setattr(presets, "PRESETS", {name: presets.PRESETS[name] for name in OPS.get(op, ())})
    found = list(conformance.findings(op, "mine", impl, CPU))
    assert found and all(of.used or of.problems for of in found), found
    return [problem for of in found for problem in of.problems]


def changed(op: str, change: Callable[[Callable[..., Any], list[Any]], Any]) -> KernelImpl:
    """The op's reference as a backend, but what it does is up to ``change``: called with it and its arguments."""
    right = reference_impl(registry.get_op(op))

    def load(target: Any, site: Any) -> Any:
        loaded = right.load(target, site)
        if isinstance(loaded, type):

            @functools.wraps(loaded.forward)  # type: ignore[attr-defined]
            def forward(self: Any, *args: Any) -> Any:
                return change(loaded.forward, [self, *args])  # type: ignore[attr-defined]

            return type("Changed", (nn.Module,), {"forward": forward})

        @functools.wraps(loaded)
        def function(*args: Any, **kwargs: Any) -> Any:
            return change(lambda *given: loaded(*given, **kwargs), list(args))

        return function

    return KernelImpl(load, lambda: (True, None))


def floating(args: list[Any]) -> list[torch.Tensor]:
    return [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]


class _Backward(torch.autograd.Function):
    """The same tensor, but its gradient is 1.1 times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 1.1


def _times(result: Any, factor: float) -> Any:
    if isinstance(result, tuple):
        return tuple(_times(part, factor) for part in result)
    return result * factor if isinstance(result, torch.Tensor) else result


def writes_an_argument(right: Callable[..., Any], args: list[Any]) -> Any:
    result = right(*args)
    first = floating(args)[0].data
    first[(0,) * first.dim()] += 1
    return result


def writes_beside_it(right: Callable[..., Any], args: list[Any]) -> Any:
    """Where an argument has gaps in memory, as a program does that takes it for contiguous."""
    result = right(*args)
    first = floating(args)[0].data
    if not first.is_contiguous():
        torch.empty(0).set_(first.untyped_storage())[-1] = 0.0
    return result


def wrong_gradient_of_one_layout(right: Callable[..., Any], args: list[Any]) -> Any:
    place = next(p for p, value in enumerate(args) if isinstance(value, torch.Tensor) and value.is_floating_point())
    if args[place].storage_offset() == 1:
        args[place] = _Backward.apply(args[place])
    return right(*args)


def wrong_without_gradients(right: Callable[..., Any], args: list[Any]) -> Any:
    return right(*args) if torch.is_grad_enabled() else _times(right(*args), 1.1)


CHANGES = {
    writes_an_argument: "it writes into argument",
    writes_beside_it: "or into the memory around",
    wrong_gradient_of_one_layout: "one element into its memory: gradient of input",
    wrong_without_gradients: "without gradients: output 0 is off",
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("op", OPS)
def test_a_wrong_backend_of_any_op_is_found(op: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(op, changed(op, change), monkeypatch)
    assert any(CHANGES[change] in problem for problem in found), found


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("op", OPS)
def test_the_reference_of_any_op_passes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(op, reference_impl(registry.get_op(op)), monkeypatch) == []


@pytest.mark.usefixtures("quick")
def test_a_weight_that_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(right: Callable[..., Any], args: list[Any]) -> Any:
        args[0].weight.data[0] += 1
        return right(*args)

    found = problems("rms_norm", changed("rms_norm", change), monkeypatch)
    assert any("it writes into the module's weight" in problem for problem in found), found


@pytest.mark.usefixtures("quick")
def test_a_gradient_that_is_right_only_beside_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with LoRA, where the weights are frozen."""

    def change(right: Callable[..., Any], args: list[Any]) -> Any:
        if not args[0].weight.requires_grad:
            args[1] = args[1].detach()
        return right(*args)

    found = problems("rms_norm", changed("rms_norm", change), monkeypatch)
    assert found == ["gradient of input 0 alone: it gives no gradient of input 0"]


@pytest.mark.usefixtures("quick")
def test_what_the_original_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", {"qwen3_moe": presets.PRESETS["qwen3_moe"]})
    (of, *_) = conformance.findings("moe_block", "mine", reference_impl(registry.get_op("moe_block")), CPU)
    assert of.state == "ok" and list(of.skipped) == ["last two dimensions swapped in memory"]
    assert "the original raised RuntimeError" in of.skipped["last two dimensions swapped in memory"]
    of.used.clear()
    assert of.state == "not run"


class Scaled(nn.Module):
    """A layer of somebody else's: ``factor * weight * x``."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.weight * x


class Threefold(Scaled):
    """The same with another factor: another variant."""

    factor = 3.0


def scaled_reference() -> Any:
    """What the reference module of somebody else's op holds."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (self.weight * x)

    def example(site: Any, variant: float) -> Example:
        module = type(site.module)()
        module.weight.data.copy_(torch.linspace(-1, 1, 8))
        return Example(module, (torch.linspace(-3, 3, 40).reshape(5, 8),))

    module: Any = types.ModuleType("scaled_reference")
    module.probe = lambda site: site.owner.factor
    module.build = lambda variant, compute_dtype=torch.float32: type("Reference", (nn.Module,), {"forward": forward})
    module.example = example
    module.places = lambda: [(nn.Sequential(Scaled(), Threefold(), Threefold()), (Scaled, Threefold))]
    return module


@pytest.fixture
def third_party(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An op that no entry of the default mapping gives to anything."""
    reference = scaled_reference()
    monkeypatch.setitem(sys.modules, reference.__name__, reference)

    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * self.weight * x

    backends = {
        "right": KernelImpl(lambda target, site: reference.build(site.variant), lambda: (True, None)),
        "doubles": KernelImpl(lambda target: Doubles, lambda: (True, None)),
    }
    registry.register_op("scaled", implementations=backends, reference=reference.__name__)
    yield reference


@pytest.mark.usefixtures("third_party")
def test_an_op_from_elsewhere_is_met_where_its_reference_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [place.site.variant for place in conformance.places("scaled")] == [2.0, 3.0]
    right, doubles = (registry.get_op("scaled").implementations[name] for name in ("right", "doubles"))
    assert problems("scaled", right, monkeypatch) == []
    found = {of.variant: of.state for of in conformance.findings("scaled", "doubles", doubles, CPU)}
    assert found == {"2.0": "ok", "3.0": "off"}
    model = nn.Sequential(Scaled())
    kernelize(model, {Scaled: KernelChoice("scaled", ("right",))}, verify=True)
    assert report(model).rows[0].verified, "the same reference serves a user's model"
    unkernelize(model)


def test_what_an_op_lacks_is_said(third_party: Any) -> None:
    third_party.places = tuple
    with pytest.raises(ValueError, match=r"no place of op scaled is known: .*places\(\) or original of its reference"):
        conformance.places("scaled")
    third_party.places = lambda: [(nn.Sequential(nn.Linear(8, 8), Scaled()), (Scaled,))]
    third_party.probe = lambda site: conformance.Reason("not-this-op", "it has no factor")
    with pytest.raises(ValueError, match="no place of op scaled is known: it has no factor"):
        conformance.places("scaled")
    registry.register_op("bare", implementations={})
    with pytest.raises(ValueError, match=r"op bare has no reference .*register_op\('bare', reference=…\)"):
        conformance.places("bare")
