"""``twinkle-kernel verify --op``: what a backend's author learns from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.cli import app
from twinkle.kernel import conformance
from twinkle.kernel.registry import KernelImpl, register_backend

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")


@pytest.fixture(autouse=True)
def two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the same two variants, but for names."""
    few = {name: presets.PRESETS[name] for name in ("llama", "gemma")}
    monkeypatch.setattr(presets, "PRESETS", few)


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", *arguments])


def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's."""
    wide = x.float()
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


def register(forward: Callable[..., Any], accepts: Any = None, available: Any = None, **members: Any) -> None:
    layer = type("Mine", (nn.Module,), {"forward": forward, **members})
    accepts = accepts or (lambda site: None if site.variant.offset == 0 else "only offset 0")
    register_backend("rms_norm", "mine", KernelImpl(lambda target: layer, available or (lambda: (True, None)), accepts))


def findings() -> dict[tuple[float, str], dict[str, Any]]:
    """By offset and dtype."""
    result = run("--op", "rms_norm", "--backend", "mine", "--json")
    found = json.loads(result.stdout)["findings"]
    return {("offset=1" in of["variant"], of["dtype"]): of for of in found}


def test_a_right_backend_passes_in_every_variant_dtype_and_layout() -> None:
    register(norm)
    found = findings()
    assert {key: of["state"] for key, of in found.items()} == {
        (offset, dtype): "refused" if offset else "ok"
        for offset in (False, True)
        for dtype in ("float32", "bfloat16", "float16")
    }
    tensors = {(used["way"], used["tensor"]) for used in found[False, "bfloat16"]["used"]}
    names = ("output 0", "gradient of input 0", "gradient of weight")
    alone = {(f"{name} alone", tensor) for name in names[1:] for tensor in ("output 0", name)}
    layouts = {(layout, name) for layout in conformance.LAYOUTS for name in names}
    assert tensors == {*layouts, ("without gradients", "output 0"), *alone}
    assert found[True, "float32"]["refused"] == "only offset 0"


def test_for_people_a_variant_is_a_row_and_a_reason_is_said_once() -> None:
    register(norm)
    result = run("--op", "rms_norm", "--backend", "mine")
    assert result.exit_code == 0 and "Off" not in result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert sum(line.startswith("llama.modeling_llama.LlamaRMSNorm ok ") for line in lines) == 1
    assert lines.count("gemma.modeling_gemma.GemmaRMSNorm: only offset 0") == 1


def test_what_is_off_in_one_dtype_says_in_which() -> None:
    register(lambda self, x: norm(self, x) * (1.1 if x.dtype is torch.bfloat16 else 1))
    result = run("--op", "rms_norm", "--backend", "mine")
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if "contiguous: output 0 is off" in line)
    assert "llama.modeling_llama.LlamaRMSNorm in bfloat16: " in line


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 1.1


class Written(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result = grad.clone()
        grad.zero_()
        return result


def ignores_strides(self: Any, x: torch.Tensor) -> torch.Tensor:
    return norm(self, x if x.is_contiguous() else x.detach().as_strided(x.shape, torch.empty(x.shape).stride()))


class Frozen:
    """A norm whose weight gets no gradient."""

    def __init__(self, module: Any) -> None:
        self.weight, self.variance_epsilon = module.weight.detach(), module.variance_epsilon


def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


WRONG = {
    "one percent": (lambda self, x: norm(self, x) * 1.01, "contiguous: output 0 is off: "),
    "a gradient": (lambda self, x: norm(self, Doubled.apply(x)), "contiguous: gradient of input 0 is off: "),
    "no gradient of the weight": (
        lambda self, x: norm(Frozen(self), x),
        "contiguous: it gives no gradient of weight",
    ),
    "strides": (ignores_strides, "every second element: output 0 is off: inf"),
    "writes into the incoming gradient": (
        lambda self, x: Written.apply(norm(self, x)),
        "contiguous: it writes into the incoming gradient of output 0, or into the memory around",
    ),
    "a tuple": (lambda self, x: (norm(self, x),), "it returns a tuple of 1 where the original returns a tensor"),
    "an exception": (raises, "contiguous: it raised RuntimeError: no such instruction"),
    "another dtype": (lambda self, x: norm(self, x).double(), "contiguous: output 0 is off: inf"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str) -> None:
    forward, words = WRONG[what]
    register(forward)
    problems = findings()[False, "float32"]["problems"]
    assert any(words in problem for problem in problems), problems
    result = run("--op", "rms_norm", "--backend", "mine")
    assert result.exit_code == 1 and words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("load", "accepts", "words"),
    [
        (lambda target: norm, lambda site: site.no_such_field, "accepts() raised AttributeError: 'Site' object has no"),
        (lambda target: norm, lambda site: True, "accepts() returned True, not None or a reason"),
        (lambda target: 1 / 0, None, "load() raised ZeroDivisionError"),
        (lambda target: None, None, "load() returned None"),
    ],
)
def test_an_answer_that_fails_is_no_refusal(load: Any, accepts: Any, words: str) -> None:
    register_backend("rms_norm", "mine", KernelImpl(load, lambda: (True, None), accepts))
    result = run("--op", "rms_norm", "--backend", "mine")
    assert result.exit_code == 1 and words in " ".join(result.output.split())


def test_a_call_that_is_left_to_the_original_is_told() -> None:
    accepts_call = staticmethod(lambda self, x: None if x.is_contiguous() else "not contiguous")
    register(norm, accepts_call=accepts_call)
    found = findings()[False, "float32"]
    assert found["state"] == "ok" and set(found["declined"].values()) == {"not contiguous"}
    assert set(found["declined"]) == {"last two dimensions swapped in memory", "every second element"}


@pytest.mark.parametrize("noisy_calls", [3, 1000])
def test_what_is_slightly_over_is_judged_anew(noisy_calls: int) -> None:
    """A kernel as exact as the original may be over the limit for a few inputs, by chance alone."""
    calls = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        noisy = x.dtype is torch.float32 and len(calls) <= noisy_calls
        return norm(self, x) * (1 + 2**-22) if noisy else norm(self, x)

    register(forward)
    found = findings()[False, "float32"]
    assert found["state"] == ("ok" if noisy_calls == 3 else "off"), found["problems"]
    assert len(calls) > 3 * len(conformance.LAYOUTS) * len(conformance.DTYPES), "some more inputs were taken"


def test_a_layout_that_the_original_cannot_have_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(presets, "PRESETS", {"qwen3_moe": presets.PRESETS["qwen3_moe"]})
    result = run("--op", "moe_block", "--backend", "loopback", "--json")
    found = json.loads(result.stdout)["findings"]
    assert result.exit_code == 0 and {of["state"] for of in found} == {"ok"}
    ways = {used["way"] for of in found for used in of["used"]}
    assert ways & conformance.LAYOUTS.keys() == conformance.LAYOUTS.keys() - {"last two dimensions swapped in memory"}


def test_the_reference_itself_passes() -> None:
    result = run("--op", "rms_norm", "--backend", "loopback", "--json")
    assert result.exit_code == 0, result.output
    assert {of["state"] for of in json.loads(result.stdout)["findings"]} == {"ok"}


def test_nothing_run_is_no_pass() -> None:
    register(norm, available=lambda: (False, "no such chip"))
    result = run("--op", "rms_norm", "--backend", "mine")
    assert result.exit_code == 3 and "no such chip" in result.output
    assert run("--op", "rms_norm", "--backend", "refuse").exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "A MODEL, or --op OP --backend BACKEND"),
        (["--op", "rms_norm"], "--op needs one --backend"),
        (["--op", "rms_norm", "--backend", "torch,liger"], "--op needs one --backend"),
        (["--op", "rms_nrm", "--backend", "torch"], "did you mean 'rms_norm'"),
        (["--op", "swiglu", "--backend", "torch"], "backend torch is not registered for op swiglu (registered: "),
        (["--op", "fla", "--backend", "torch"], "op fla has no reference that says what it computes"),
        (["tiny:qwen3", "--op", "rms_norm", "--backend", "torch"], "--op has no use for MODEL"),
        (["--op", "rms_norm", "--backend", "torch", "--layers", "2"], "--op has no use for --layers"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1
