"""The command ``verify``: its verdicts, and what they rest on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from twinkle import presets
from twinkle.cli import app
from twinkle.commands import comparison, verify
from twinkle.kernel import judgement
from twinkle.kernel import verify as verify_module
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.registry import KernelImpl, register_backend


def run(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: Any) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_verify_judges_each_entry_alone_and_all_together() -> None:
    from transformers.models.qwen3 import modeling_qwen3

    rotary = modeling_qwen3.apply_rotary_pos_emb
    facts = run_json("verify", "tiny:qwen3", "--backend", "torch", "--device", "cpu")
    assert (facts["device"], facts["dtype"], facts["ok"]) == ("cpu", "float32", True)
    by_target = {entry["target"].rpartition(".")[2]: entry for entry in facts["entries"]}
    norm, together = by_target["Qwen3RMSNorm"], by_target["all together"]
    assert (norm["verdict"], norm["backends"], norm["sites"], norm["calls"]) == ("ok", ["torch"], 9, 27)
    assert 0 < norm["used"] <= 1 and norm["worst"].startswith(("gradient of ", "logits"))
    assert (by_target["sdpa"]["verdict"], by_target["sdpa"]["sites"]) == ("ok", 2)
    assert "fla" not in by_target
    shown = run("verify", "tiny:qwen3", "--backend", "torch", "--device", "cpu").output
    assert "Entries: 3 ok, 1 not installed." in shown
    assert together["sites"] == sum(entry["sites"] for entry in facts["entries"] if entry is not together)
    assert modeling_qwen3.apply_rotary_pos_emb is rotary


def test_verify_of_a_config_with_fewer_layers(tmp_path: Path) -> None:
    presets.preset_config("qwen3").save_pretrained(tmp_path)
    facts = run_json("verify", tmp_path, "--layers", "1", "--backend", "torch", "--dtype", "bf16")
    norm = next(entry for entry in facts["entries"] if entry["target"].endswith("RMSNorm"))
    assert (norm["sites"], norm["verdict"]) == (5, "ok")


def test_verify_exits_with_3_when_nothing_could_be_verified() -> None:
    result = run("verify", "tiny:qwen3", "--backend", "npu", "--device", "cpu")
    assert result.exit_code == 3
    assert "Nothing was verified" in result.output and "--backend inductor" in result.output


def test_verify_says_that_no_entry_names_a_part_of_the_model(tmp_path: Path) -> None:
    small = '"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64'
    (tmp_path / "config.json").write_text(f'{{"model_type": "t5", {small}}}')
    result = run("verify", tmp_path, "--device", "cpu")
    assert result.exit_code == 3
    assert "no entry of the default mapping names a part of this model" in result.output
    assert "--backend" not in result.output


def test_verify_does_not_propose_the_backend_that_was_given() -> None:
    kept = verify.Outcome("a.b", verify.NOT_INSTALLED, [])
    assert "--backend inductor" in verify.conclusion([kept, kept], "cpu", "m")
    assert "--backend" not in verify.conclusion([kept, kept], "cpu", "m", ["inductor"])


def test_verify_raises_no_false_alarm_for_the_hundreds_of_tensors_of_a_deep_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("verify", "tiny:qwen3", "--layers", "36", "--device", "cpu")
    assert run(*arguments).exit_code == 0
    monkeypatch.setattr(judgement, "SURE", 0.0)  # as without a second look
    assert run(*arguments).exit_code == 1


@pytest.mark.parametrize(
    ("used", "asked", "judged"),
    [
        ([0.5, 1.2, 0.9], 3, 0.9),
        ([1.2, 1.2, 0.9] + [1.2, 0.8] * 4 + [0.8], 12, 0.8),  # by chance
        ([1.2, 1.2, 0.9] + [1.2, 0.8] * 4 + [1.2], 12, 1.2),
        ([0.9, 2.5, 2.5], 3, 2.5),
        ([float("inf")] * 3, 3, float("inf")),
    ],
)
def test_verify_judges_a_tensor_anew_that_is_slightly_over(
    used: list[float], asked: int, judged: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter(used)
    calm = verify_module.Comparison("calm", 0.5)
    monkeypatch.setattr(
        verify_module, "compare_models", lambda *given: [calm, verify_module.Comparison("logits", next(shares))]
    )
    model = presets.build("llama")
    assert comparison.judge(model, model) == {"calm": 0.5, "logits": judged}
    assert len(used) - len(list(shares)) == asked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_finds_a_norm_that_is_one_percent_off(dtype: str, own_registry: None) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        width = hidden_states.shape[-1:]
        return torch.nn.functional.rms_norm(hidden_states, width, self.weight, self.variance_epsilon) * 1.01

    _register("percent", forward)
    result = run("verify", "tiny:qwen3", "--backend", "percent", "--layers", "12", "--dtype", dtype)
    assert result.exit_code == 1 and " off" in result.output


def test_what_is_over_the_limit_never_reads_as_100_percent() -> None:
    assert [verify.percent(used) for used in (0.994, 1.0, 1.00001, 1.04, 3.0)] == [
        "99%", "100%", "100.1%", "104.0%", "300%"
    ]  # fmt: skip


def _register(name: str, forward: Callable[..., Any]) -> None:
    register_backend("rms_norm", name, KernelImpl(lambda target: layer("Faulty", forward), lambda: (True, None)))


def test_verify_exits_with_1_and_names_the_tensor_when_a_kernel_is_off(own_registry: None) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, 1e-3)

    _register("faulty", forward)
    result = run("verify", "tiny:qwen3", "--backend", "faulty", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    entry = next(entry for entry in facts["entries"] if entry["target"].endswith("Qwen3RMSNorm"))
    assert (facts["ok"], entry["verdict"]) == (False, "off")
    assert entry["used"] > 1 and entry["worst"]
    assert " off" in run("verify", "tiny:qwen3", "--backend", "faulty").output


@pytest.mark.parametrize(("off_for", "exit_code"), [(1, 0), (2, 1)])
def test_verify_judges_by_most_of_three_inputs(off_for: int, exit_code: int, own_registry: None) -> None:
    calls = iter(range(1000))

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        right = torch.nn.functional.rms_norm(
            hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon
        )
        call = next(calls) % 15  # 5 norms, 3 inputs; alone, then together with the other entries
        return right * 1.1 if call < 5 * off_for else right

    _register("moody", forward)
    assert run("verify", "tiny:llama", "--backend", "moody").exit_code == exit_code


def test_verify_takes_inputs_for_which_no_token_changes_its_expert() -> None:
    original = presets.build("qwen3_moe")
    assert len(list(islice(comparison.comparable_inputs(original, copy.deepcopy(original)), 5))) == 5
    other = copy.deepcopy(original)
    for name, parameter in other.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.neg_()
    assert list(comparison.comparable_inputs(original, other)) == []
    dense = presets.build("llama")
    assert len(list(islice(comparison.comparable_inputs(dense, dense), 5))) == 5


def test_verify_reports_a_kernel_that_raises_and_goes_on(own_registry: None) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal instruction")

    _register("raising", forward)
    result = run("verify", "tiny:qwen3", "--backend", "raising,torch")
    assert result.exit_code == 1
    assert "qwen3.Qwen3RMSNorm: RuntimeError: illegal instruction" in result.output
    assert "Entries: 2 ok, 1 off" in result.output


def test_verify_does_not_call_a_kernel_proved_that_was_never_called(own_registry: None) -> None:
    class Refusing(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise AssertionError

        @staticmethod
        def accepts_call(self: Any, hidden_states: torch.Tensor) -> str:
            return "too small"

    register_backend("rms_norm", "shy", KernelImpl(lambda target: Refusing, lambda: (True, None)))
    result = run("verify", "tiny:qwen3", "--backend", "shy")
    assert result.exit_code == 3
    assert "not called" in result.output and "27 calls by the original: too small" in result.output
