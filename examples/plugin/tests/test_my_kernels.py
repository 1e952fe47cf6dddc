"""What the author of a plug-in runs, with the plug-in installed."""

from __future__ import annotations

import torch
from transformers.activations import ReLUSquaredActivation
from typer.testing import CliRunner

from twinkle import presets
from twinkle.aten import install
from twinkle.cli import app
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


class Identity(torch.nn.Module):
    """A place that the op is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"


def test_the_backend_keeps_the_ops_contract() -> None:
    result = CliRunner().invoke(app, ["verify", "--op", "rms_norm", "--backend", "mine"])
    assert result.exit_code == 0, result.output


def test_a_model_gets_the_backend() -> None:
    model = presets.build("qwen3")
    kernelize(model, {**DEFAULT_KERNEL_CONFIG, NORM: KernelChoice("rms_norm", ("mine",))}, verify=True)
    model(**presets.inputs(model, batch=16, length=256))
    row = report(model).row(NORM)
    assert (row.state, row.backend, row.instances, row.verified) == ("installed", "mine", 9, True)
    assert row.calls == 9
    unkernelize(model)


def test_the_op_is_recognised_by_what_it_computes_and_its_backend_keeps_the_contract() -> None:
    result = CliRunner().invoke(app, ["verify", "--op", "relu_squared", "--backend", "mine"])
    assert result.exit_code == 0, result.output
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), ReLUSquaredActivation(), torch.nn.ReLU())
    choice = KernelChoice("relu_squared", ("mine",))
    kernelize(model, {ReLUSquaredActivation: choice}, strict=True, verify=True)
    assert report(model).row("ReLUSquaredActivation").verified
    unkernelize(model)
    other = torch.nn.Sequential(Identity())
    kernelize(other, {Identity: choice})
    assert report(other).row("Identity").state == "refused"


def test_the_operator_is_served_and_taken_back() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    expected = torch.nn.functional.mish(x)
    with install(["mish"], platform="cpu") as installed:
        found = torch.nn.functional.mish(x)
        found.sum().backward()
        assert installed.registrations["mish"].counts.kernel == 1
    torch.testing.assert_close(found, expected)
    assert x.grad is not None


def test_the_operator_passes_the_levels() -> None:
    for level in ("kernel", "op"):
        result = CliRunner().invoke(app, ["ops", "run", "mish", "--level", level])
        assert result.exit_code == 0, result.output
