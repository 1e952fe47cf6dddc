"""The command ``bench MODEL``, run on tiny models: its table, its result file, its exit codes and its errors.

What its figures decide depends on this machine, and is tested on given ones in ``test_bench_worth.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from tests.support.results import check_schema
from twinkle import presets
from twinkle.bench.model import OriginalFailed, Variant, measure, variants
from twinkle.bench.results import read
from twinkle.bench.step import memory_of
from twinkle.bench.worth import conclude
from twinkle.cli import app
from twinkle.commands.models import find_model
from twinkle.kernel import registry
from twinkle.kernel.ops.derived import layer
from twinkle.kernel.registry import KernelImpl, register_backend
from twinkle.kernel.report import report

NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
SMALL = ("--device", "cpu", "--batch", "2", "--length", "16")
QUICK = (*SMALL, "--budget", "1")


def run(*arguments: str, columns: int = 200) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["bench", *arguments])


def backend(name: str, forward: Callable[..., Any]) -> None:
    """A backend of the op ``rms_norm``, which goes after the test."""
    register_backend("rms_norm", name, KernelImpl(lambda target: layer("Backend", forward), lambda: (True, None)))


def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_it_measures_each_entry_alone_and_all_together_and_leaves_no_trace(tmp_path: Path) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    rotary, path = modeling_qwen3.apply_rotary_pos_emb, tmp_path / "model.json"
    result = run("tiny:qwen3", *QUICK, "--output", str(path))
    assert result.exit_code == 0, result.output
    content = json.loads(path.read_text())
    check_schema(content)
    rows = {(row.case.rpartition(".")[2].removeprefix("model/"), row.who): row for row in read(path).results}
    norms, together = rows["Qwen3RMSNorm", "torch"], rows["all together", "default"]
    assert list(rows)[0] == ("original", "hf") and ("original", "hf again") in rows and len(rows) == 5
    assert (norms.figures["calls"], norms.figures["sites"], norms.chosen) == (9, 9, True)
    assert rows["apply_rotary_pos_emb", "torch"].figures["calls"] == 2
    assert together.figures["calls"] == 11
    assert together.shape == "2x16" and together.figures["tokens_per_s"] > 0
    assert "saved_us" in norms.figures and "gain_us" not in norms.figures
    original = rows["original", "hf"]
    # A norm of transformers keeps what it squared, this one doesn't.
    assert 0 < norms.figures["step_memory_gb"] < original.figures["step_memory_gb"]
    assert "saved_us" not in original.figures and original.samples == norms.samples >= 3
    settings = content["run"]["settings"]
    assert (settings["model"], settings["class"], settings["shape"]) == ("tiny:qwen3", "Qwen3ForCausalLM", "2x16")
    assert content["conclusions"] == conclude(read(path).results).to_dict()
    assert modeling_qwen3.apply_rotary_pos_emb is rotary
    for part in ("qwen3.Qwen3RMSNorm ", "torch*", "all together", "A step of the original takes", f"written: {path}"):
        assert part in result.stdout
    assert "tiny:qwen3: Qwen3ForCausalLM with random weights, 132k parameters, float32, batch 2x16" in result.stdout


def test_json_is_pure() -> None:
    result = run("tiny:llama", *QUICK, "--op", "rotary", "--json")
    assert result.exit_code == 0 and not result.stderr
    content = json.loads(result.stdout)
    check_schema(content)
    assert {row["case"].rpartition(".")[2] for row in content["results"]} == {"model/original", "apply_rotary_pos_emb"}


@pytest.mark.parametrize("columns", [32, 80])
def test_on_a_narrow_terminal_lines_fit(columns: int) -> None:
    result = run("tiny:llama", *QUICK, columns=columns)
    assert result.exit_code == 0
    assert not [line for line in result.stdout.splitlines() if len(line) > columns and len(line.split()) > 1]
    assert "llama.apply_rotary_pos_emb" in result.stdout


def test_an_opt_in_entry_is_measured_when_it_is_asked_for() -> None:
    result = run("tiny:qwen3", *QUICK, "--op", "rotary", "--also", "fused_ce,npu", "--json")
    rows = {(row["case"], row["who"]): row for row in json.loads(result.stdout)["results"]}
    fused, together = rows["model/fused_ce", "torch"], rows["model/all together", "default+fused_ce"]
    assert (fused["figures"]["calls"], together["figures"]["calls"]) == (1, 3)
    assert not fused["chosen"] and not together["chosen"]
    assert ("model/fused_ce", "inductor") not in rows, "it compiles, and wasn't asked for"
    text = run("tiny:gemma4_vision", *QUICK, "--also", "fused_ce,npu").stdout
    assert "fused_ce, torch: not installed: the installer found no site in this model" in text
    assert "Of --also, nothing of npu can be installed in this model here." in text


def test_a_config_and_a_model_without_tokens(tmp_path: Path) -> None:
    presets.preset_config("qwen2").save_pretrained(tmp_path)
    facts = json.loads(run(str(tmp_path), *QUICK, "--layers", "1", "--dtype", "bf16", "--json").stdout)
    assert (facts["run"]["settings"]["dtype"], facts["results"][0]["dtype"]) == ("bfloat16", "bfloat16")
    norms = next(row for row in facts["results"] if row["case"].endswith("RMSNorm"))
    assert norms["figures"]["calls"] == 3
    facts = json.loads(run("tiny:internvl", *QUICK, "--json").stdout)
    assert facts["run"]["settings"]["shape"] == "2"
    assert not any("tokens_per_s" in row["figures"] for row in facts["results"])


def test_usual_batches_are_large_enough_for_the_kernels_of_a_preset() -> None:
    from twinkle.commands.bench_model import PRESET_BATCH
    from twinkle.kernel.ops.worthwhile import LEAST

    least = LEAST["rms_norm", "torch"]["cpu"].elements
    assert PRESET_BATCH[0] * PRESET_BATCH[1] * presets.preset_config("qwen3").hidden_size >= least


def test_a_faster_backend_becomes_a_mapping_to_copy(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original sleeps, what the default mapping takes sleeps less: each longer than the rest of the step takes."""
    from transformers.models.qwen3 import modeling_qwen3

    def sleeping(seconds: float) -> Callable[..., Any]:
        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds)
            return norm(self, hidden_states)

        return forward

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", sleeping(6e-3))
    registry.get_op("rms_norm").implementations.pop("torch")
    backend("torch", sleeping(3e-3))
    backend("mine", norm)
    result = run("tiny:qwen3", *SMALL, "--op", "rms_norm", "--also", "mine")
    assert result.exit_code == 0, result.output
    names: dict[str, Any] = {}
    exec(result.stdout[result.stdout.index("from twinkle.kernel import") :], names)
    assert names["mapping"][NORM].backends == ("npu", "triton", "liger", "mine", "torch")


def test_what_compiles_is_compiled_once_and_never_given_up(own_registry: None) -> None:
    """More rounds than the variants that a compiler keeps of one function."""
    traced = []

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return norm(self, hidden_states)

    compiled = torch.compile(forward, backend="eager")
    backend("compiled", lambda self, hidden_states: compiled(self, hidden_states))
    model = presets.build("llama", num_hidden_layers=1).train()
    everyone = variants(model, also=["compiled"], ops=["rms_norm"])
    inputs = presets.inputs(model, batch=1, length=8)
    assert measure(model, inputs, everyone, seconds=600, rounds=9) is False
    assert {variant.who: len(variant.done_ms) for variant in everyone} == dict.fromkeys(
        ("hf", "hf again", "torch", "compiled"), 9
    )
    assert all(traced), "it ran uncompiled"
    assert not report(model).rows


# --- what goes wrong --------------------------------------------------------------------------------------------------


def wrong(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return 2 * norm(self, hidden_states)


def raising(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("illegal instruction")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (wrong, "qwen3.Qwen3RMSNorm, bad: wrong: its loss is "),
        (raising, "qwen3.Qwen3RMSNorm, bad: wrong: a training step raised RuntimeError: illegal instruction"),
    ],
)
def test_a_wrong_kernel_is_not_timed_and_makes_the_exit_code_1(
    forward: Callable[..., Any], said: str, own_registry: None
) -> None:
    backend("bad", forward)
    result = run("tiny:qwen3", *QUICK, "--op", "rms_norm", "--also", "bad")
    assert result.exit_code == 1
    assert said in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if " bad " in line)
    assert line.endswith("not measured")


def test_where_no_kernel_can_be_installed_the_exit_code_is_3() -> None:
    result = run("tiny:qwen3", *QUICK, "--op", "moe_experts")
    assert result.exit_code == 3
    text = " ".join(result.stdout.split())
    assert "Nothing was measured: the default mapping installs no kernel for moe_experts in this model on cpu" in text
    assert "`twinkle-kernel plan tiny:qwen3` says why; --also inductor" in text


@pytest.mark.parametrize(("limit", "least"), [(1, 0), (9 * 30, 2)], ids=["in the first step", "in one of the rounds"])
def test_an_interrupted_run_shows_and_keeps_what_it_has(
    limit: int, least: int, own_registry: None, tmp_path: Path
) -> None:
    calls = []

    def impatient(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == limit:
            raise KeyboardInterrupt
        return norm(self, hidden_states)

    backend("impatient", impatient)
    path = tmp_path / "part.json"
    result = run("tiny:qwen3", *SMALL, "--op", "rms_norm", "--also", "impatient", "--output", str(path))
    assert result.exit_code == 130, result.output
    found = read(path)
    assert found.run["settings"]["interrupted"] is True
    (samples,) = {row.samples for row in found.results}
    assert samples >= least
    assert "qwen3.Qwen3RMSNorm" in result.stdout
    assert least or "The original wasn't measured: interrupted before it was measured." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny:qwen33",), "unknown preset 'qwen33'; did you mean 'qwen3'?"),
        (("rms_norm",), "'rms_norm' is an op, not a model: `twinkle-kernel bench --op rms_norm` times it"),
        (("tiny:qwen3", "--quick"), "--quick goes without a MODEL; leave it out"),
        (("tiny:qwen3", "--no-inductor"), "--no-inductor goes without a MODEL; leave it out"),
        (("--batch", "3"), "--batch goes only with a MODEL; name one: bench MODEL --batch"),
        (("tiny:qwen3", "--also", "tritn"), "unknown backend 'tritn'; did you mean 'triton'?"),
        (("tiny:qwen3", "--also", ","), "--also ',' names nothing"),
        (("tiny:qwen3", "--op", "rmsnorm"), "op 'rmsnorm' is none of the default mapping; did you mean 'rms_norm'?"),
        (("tiny:qwen3", "--device", "cdua"), "unknown device 'cdua'; did you mean 'cuda'?"),
        (("tiny:qwen3", "--dtype", "bf61"), "unknown dtype 'bf61'"),
        (("tiny:qwen3", "--output", "no_such/b.json"), "--output no_such/b.json: there is no folder no_such"),
        (("tiny:qwen3_vl", "--device", "cpu", "--length", "4"), "tiny:qwen3_vl: length 4 is too short for 4 image"),
    ],
)
def test_what_the_user_can_mend_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"twinkle-kernel: {message}"), result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_a_model_that_can_not_take_the_step_is_told_apart_from_a_bug(tmp_path: Path) -> None:
    """Its positions are learned, and the batch has more of them."""
    settings = {"model_type": "opt", "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = {"vocab_size": 64, "max_position_embeddings": 8, "word_embed_proj_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(settings | small))
    model = find_model(str(tmp_path)).with_random_weights(torch.float32, "cpu")
    everyone = [Variant("model/original", "hf")]
    with pytest.raises(OriginalFailed, match=r"^it raised \w+Error: "):
        measure(model, presets.inputs(model, length=16), everyone, seconds=1)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_what_a_step_holds_at_a_time_beyond_what_was_there(capfd: pytest.CaptureFixture[str]) -> None:
    model, kept = torch.nn.Linear(1, 1), [torch.ones(1000)]

    def step() -> None:
        kept.clear()  # what was there before doesn't count when it goes
        first = torch.ones(250_000)  # 1 MB
        del first
        torch.ones(500_000) + 1  # 2 MB and 2 MB

    assert memory_of(step, model, torch.device("cpu")) == {"step_memory_gb": pytest.approx(0.004, abs=1e-6)}
    assert not capfd.readouterr().err


def test_on_an_accelerator_memory_is_what_its_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allocator:
        held = most = 0

        @classmethod
        def take(cls, size: int) -> None:
            cls.held += size
            cls.most = max(cls.most, cls.held)

        memory_allocated = classmethod(lambda cls, device: cls.held)
        max_memory_allocated = classmethod(lambda cls, device: cls.most)
        synchronize = classmethod(lambda cls: None)

        @classmethod
        def reset_peak_memory_stats(cls, device: torch.device) -> None:
            cls.most = cls.held

    def step() -> None:
        Allocator.take(200_000_000)
        Allocator.take(-200_000_000)

    Allocator.take(900_000_000)
    Allocator.take(-800_000_000)  # a peak of before, which isn't the step's
    monkeypatch.setattr(torch, "get_device_module", lambda device: Allocator)
    model = torch.nn.Linear(1, 1)
    expected = {"step_memory_gb": 0.2, "peak_memory_gb": 0.3}
    assert memory_of(step, model, torch.device("cuda")) == expected
    monkeypatch.delattr(Allocator, "reset_peak_memory_stats")
    assert memory_of(step, model, torch.device("mps")) == {}
