"""The op ``fla`` by flash-linear-attention: how its functions are called, and what isn't for them; by a stand-in."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.linear_attention import NO_DRIVER, NO_FP64, inputs, write_package
from tests.support.models import clean_process  # noqa: F401
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.fla import library, reference
from twinkle.kernel.registry import availability, get_op
from twinkle.kernel.report import report
from twinkle.kernel.targets import Site
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used, compare_models

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


@pytest.mark.parametrize("convolutions", ["causal_conv1d", "convolution"])
def test_the_librarys_functions_are_called_as_they_are_declared(
    package: Path, monkeypatch: pytest.MonkeyPatch, convolutions: str
) -> None:
    """By a stand-in of the same parameters, as if it ran on a CPU; on a GPU see tests/transformers."""
    write_package(package, convolutions=convolutions)
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    assert availability(get_op("fla").implementations["fla"]) is None
    original = presets.build("qwen3_next")
    model = kernelize(copy.deepcopy(original), {"fla": KernelChoice("fla", ("fla",))})
    comparisons = compare_models(original, model, presets.inputs(model), presets.loss)
    assert [c for c in comparisons if c.used > 1] == []
    row = report(model).row("fla")
    assert (row.backend, row.calls, row.fallbacks) == ("fla", 2, {})
    ids = torch.arange(5, 12)[None]
    assert torch.equal(model.generate(ids, max_new_tokens=4), original.generate(ids, max_new_tokens=4))
    unkernelize(model)


def test_what_is_missing_is_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = get_op("fla").implementations["fla"].available
    assert "needs cuda or npu" in str(ask()[1])
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    assert "is not installed" in str(ask()[1])
    write_package(package, convolutions="elsewhere")
    assert "importing flash-linear-attention raised ModuleNotFoundError: none of" in str(ask()[1])


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("normalised", [True, False])
def test_what_a_rule_is_asked_reaches_the_library(package: Path, normalised: bool, name: str) -> None:
    write_package(package)
    tensors, bounds = inputs(9), torch.tensor([0, 4, 9])
    states = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1))
    options = {"initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": normalised}
    found = library.load("fla")[name](*tensors, **options, cu_seqlens=bounds)
    expected = reference.recurrent(*tensors, states, True, normalised, bounds)
    exact = [tensor.double() for tensor in tensors]
    right = reference.recurrent(*exact, states.double(), True, normalised, bounds, compute_dtype=torch.float64)
    used = [allowed_error_used(*one) for one in zip(found, expected, right, strict=True)]
    assert max(used) <= 1, used


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 4, 9])])
def test_a_convolution_by_the_library_keeps_documents_apart(package: Path, bounds: torch.Tensor | None) -> None:
    write_package(package)
    x, weight, bias = torch.randn(1, 12, 9), torch.randn(12, 4), torch.randn(12)
    found = library.load("fla")["causal_conv1d_fn"](x, weight, bias, "silu", cu_seq_lens_q=bounds)
    torch.testing.assert_close(found, reference.causal_convolution(x, weight, bias, "silu", bounds))


def test_a_version_that_lacks_a_parameter_is_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes ``**kwargs``: the packed documents would leak without a word."""
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    write_package(package)
    rules = package / "fla" / "ops" / "gated_delta_rule.py"
    rules.write_text(rules.read_text().replace("cu_seqlens=None, chunk_size=64)", "chunk_size=64, **kwargs)"))
    reason = get_op("fla").implementations["fla"].available()[1]
    assert "chunk_gated_delta_rule has no parameter cu_seqlens: a newer version may" in str(reason)


def test_the_librarys_recurrent_rule_is_not_for_training(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(package)
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    found, tensors = library.load("fla"), inputs(1)
    rule = found["torch_recurrent_gated_delta_rule"]
    assert rule.accepts_call(*tensors) is None
    tensors[3].requires_grad_()
    assert rule.accepts_call(*tensors) == "flash-linear-attention's recurrent rule has no gradient"
    assert found["torch_chunk_gated_delta_rule"].accepts_call(*tensors) is None
    with torch.no_grad():
        assert rule.accepts_call(*tensors) is None


@pytest.mark.parametrize(
    ("capability", "triton", "wrong"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.4.0rc1", True),
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.10.0", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_a_gradient_that_triton_compiles_wrongly_is_not_asked_for(
    package: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str, wrong: bool
) -> None:
    write_package(package)
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    rule, tensors = library.load("fla")["torch_chunk_gated_delta_rule"], inputs(5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(library, "version_of", lambda name: triton)
    ask = library.wrong_gradient.__wrapped__  # what it was asked before is another machine's
    found = ask(torch.device("cuda"))
    assert (f"Triton {triton} computes the gradient" in (found or "")) is wrong
    monkeypatch.setattr(library, "wrong_gradient", lambda device: found)
    assert rule.accepts_call(*tensors) is None, "nobody wants it"
    tensors[0].requires_grad_()
    assert rule.accepts_call(*tensors) == found
    (package / "tilelang.py").write_text("")  # which has kernels of its own for it
    assert ask(torch.device("cuda")) is None and ask(torch.device("cpu")) is None


def test_which_calls_are_for_the_library(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(package)
    rule = library.load("fla")["torch_chunk_gated_delta_rule"]
    assert rule.accepts_call(*inputs(5)) == "the tensors are on cpu"
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    assert rule.accepts_call(*inputs(5)) is None
    assert "none of bf16" in rule.accepts_call(*inputs(5, dtype=torch.float64))


def test_the_switch_is_about_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: str) -> Any:
        return library.accepts(Site(None, "fla", None, "fla", None, torch.device(device), torch.bfloat16))

    monkeypatch.setattr(library, "DEVICES", ("cpu", "cuda"))
    for value in ("0", "false", "OFF"):
        monkeypatch.setenv(library.ON_NPU, value)
        assert reason("cpu") is None and "runs on cpu and cuda, not on meta" in str(reason("meta"))


ON_A_CPU = """
import logging, torch
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.report import report
model = presets.build("qwen3_next")
try:
    model(**presets.inputs(model))
except RuntimeError as error:
    assert "active drivers" in str(error)
else:
    raise AssertionError("transformers doesn't call the library")
kernelize(model)
told = report(model).row("fla").why()
assert "transformers calls it here all the same" in told and "KernelChoice('fla', ('torch',))" in told, told
kernelize(model, {"fla": KernelChoice("fla", ("torch",))})
assert torch.isfinite(model(**presets.inputs(model)).logits).all()
"""


def test_a_cpu_with_the_library_installed_keeps_working(tmp_path: Path) -> None:
    """Transformers calls it wherever it is installed; the report says so, and what to do."""
    path = [str(write_package(tmp_path, NO_DRIVER)), str(ROOT / "src")]
    code = f"import sys; sys.path[:0] = {path!r}\n{ON_A_CPU}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


JUDGED = """
import copy
from twinkle import presets
from twinkle.kernel.verify import compare_models
import transformers.models.qwen3_next.modeling_qwen3_next as modeling
before = modeling.torch_chunk_gated_delta_rule
model = presets.build("qwen3_next")
found = compare_models(model, copy.deepcopy(model), presets.inputs(model), presets.loss)
assert len(found) > 20 and all(0 < comparison.used < 0.6 for comparison in found), found
assert modeling.torch_chunk_gated_delta_rule is before
try:
    model.double()(**presets.inputs(model))
except AssertionError as error:
    assert "no fp64" in str(error)
else:
    raise AssertionError("transformers doesn't call the library")
"""


@pytest.mark.parametrize("kernels", ["YES", "NO"])
def test_a_judge_computes_in_fp64_where_the_library_has_none(tmp_path: Path, kernels: str) -> None:
    """As on a GPU with it installed, where transformers calls it in every dtype; with the package kernels and not."""
    path = [str(write_package(tmp_path, NO_FP64)), str(ROOT / "src")]
    code = f"import sys; sys.path[:0] = {path!r}\n{JUDGED}"
    environment = {**os.environ, "USE_HUB_KERNELS": kernels}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
