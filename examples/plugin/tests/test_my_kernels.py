"""What the author of a plug-in runs, with the plug-in installed."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from twinkle import presets
from twinkle.aten import install
from twinkle.cli import app
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize

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
