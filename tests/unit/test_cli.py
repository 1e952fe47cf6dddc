"""The command: help, JSON, exit codes and the one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import twinkle
from twinkle import presets
from twinkle.cli import app
from twinkle.commands import console, models, options
from twinkle.commands.models import auto_class, cut_layers, find_model
from twinkle.kernel import plugins, registry
from twinkle.platforms import PLATFORMS

COMMANDS = ("info", "plan", "verify", "bench", "demo")
SCRIPT = Path(sys.executable).with_name("twinkle-kernel")


def run(*arguments: str) -> Any:
    # Wide enough that no table is wrapped, however the tests themselves are run.
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: str) -> Any:
    """What a command prints with --json: pure JSON, or json.loads raises."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def strings(data: Any, at: str = "") -> list[tuple[str, str]]:
    """All strings in JSON, each with the key that it stands under."""
    if isinstance(data, dict):
        return [pair for key, value in data.items() for pair in strings(value, key)]
    if isinstance(data, list):
        return [pair for value in data for pair in strings(value, at)]
    return [(at, data)] if isinstance(data, str) else []


@pytest.fixture(scope="module")
def saved_configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A preset's configuration as a checkpoint's folder has it."""
    root = tmp_path_factory.mktemp("configs")

    def save(name: str) -> Path:
        presets.preset_config(name).save_pretrained(root / name)
        return root / name

    return save


# --- help and start -----------------------------------------------------------------------------------------------


def test_what_an_issue_is_asked_for_holds_no_paths_but_where_ops_was_found() -> None:
    """As docs/*/troubleshooting.md says: people paste it in public."""
    told = [("info", run_json("info")), ("plan", run_json("plan", "tiny:qwen3", "--all"))]
    paths = [(command, key) for command, data in told for key, text in strings(data) if Path(text).is_absolute()]
    assert set(paths) <= {("info", "found")}


def test_help_of_the_whole_names_every_command_and_the_exit_codes() -> None:
    text = run("--help").output
    assert all(f" {command} " in text for command in (*COMMANDS, "ops"))
    assert "Examples" in text and "Exit codes" in text


@pytest.mark.parametrize("columns", ["32", "80"])
@pytest.mark.parametrize(
    "arguments", [["info"], ["plan", "tiny:qwen3_moe"], ["plan", "tiny:qwen3_vl", "--device", "npu"]]
)
def test_on_a_narrow_terminal_lines_fit_and_names_stay_whole(arguments: list[str], columns: str) -> None:
    text = CliRunner(env={"COLUMNS": columns}).invoke(app, arguments).output
    long = [line for line in text.splitlines() if len(line.rstrip()) > int(columns) and len(line.split()) > 1]
    assert long == []
    names = ["multimodal_rotary"] if arguments == ["info"] else ["apply_rotary_pos_emb", "RMSNorm", "MLP.forward"]
    assert all(name in text for name in names)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_every_option_and_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.output and f"twinkle-kernel {command}" in result.output
    group = typer.main.get_command(app)
    for parameter in group.commands[command].params:  # type: ignore[attr-defined]
        assert parameter.help, f"{command}: {parameter.name} has no help"
        shown = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        assert shown in result.output


def test_no_line_of_the_help_is_folded_on_a_terminal_of_80_columns() -> None:
    group = typer.main.get_command(app)
    for command in (group, *group.commands.values()):  # type: ignore[attr-defined]
        assert max(map(len, (command.help or "").splitlines())) <= 78, command.name


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from twinkle.cli import app\n"
        "for argument in ('--help', '--version'):\n"
        "    app([argument], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'triton', 'kernels', 'liger_kernel', 'torch_npu'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_installed_script_runs() -> None:
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"twinkle-kernel {twinkle.__version__}\n")


# --- info -----------------------------------------------------------------------------------------------------------


def test_info_lists_platforms_versions_ops_and_backends() -> None:
    facts = run_json("info")
    assert [platform["name"] for platform in facts["platforms"]] == list(PLATFORMS)
    cpu, *others = facts["platforms"]
    assert cpu == {"name": "cpu", "aliases": [], "device_type": "cpu", "present": True, "reason": None}
    assert all(platform["present"] or platform["reason"] for platform in others)
    assert torch.__version__.startswith(facts["versions"]["torch"])  # some builds name themselves behind a plus
    assert facts["versions"]["torch_npu"] is None
    assert facts["ops"].keys() == registry.ops().keys()
    for backends in facts["ops"].values():
        assert set(registry.KNOWN_BACKENDS) <= backends.keys()
        assert all(found["available"] == (found["reason"] is None) for found in backends.values())
    assert facts["ops"]["rms_norm"]["torch"]["available"]
    assert not facts["ops"]["fla"]["inductor"]["available"]


def test_info_says_each_reason_once() -> None:
    text = run("info").output
    liger = registry.availability(registry.get_op("rms_norm").implementations["liger"])
    assert liger is not None
    assert " ".join(text.split()).count(liger.text.partition("(")[0].strip()) == 1
    assert "inductor for fla: the op has no reference" in text
    assert any(line.split() == ["torch_npu", "not", "installed"] for line in text.splitlines())


def test_info_names_a_broken_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_ops.py").write_text("raise RuntimeError('no licence key')\n")
    metadata = tmp_path / "broken_ops-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-ops\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[twinkle.kernel_ops]\nbroken = broken_ops:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_errors", None)
    (plugin,) = run_json("info")["plugins"]
    assert (plugin["name"], plugin["distribution"]) == ("broken", "broken-ops")
    assert "no licence key" in plugin["error"]
    assert "no licence key" in run("info").output
    assert not caplog.records  # the output has it


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_of_a_preset() -> None:
    facts = run_json("plan", "tiny:qwen3", "--backend", "torch", "--device", "cpu", "--all")
    assert (facts["model"], facts["class"], facts["device"]) == ("tiny:qwen3", "Qwen3ForCausalLM", "cpu")
    assert facts["parameters"] == sum(parameter.numel() for parameter in presets.build("qwen3").parameters())
    rows = {row["target"].rpartition(".")[2]: row for row in facts["rows"]}
    assert (rows["Qwen3RMSNorm"]["state"], rows["Qwen3RMSNorm"]["instances"]) == ("installed", 9)
    assert rows["LlamaRMSNorm"]["state"] == "unused"
    fewer = run_json("plan", "tiny:qwen3", "--backend", "torch", "--device", "cpu")
    assert fewer["rows"] == [row for row in facts["rows"] if row["state"] != "unused"] != []
    assert {**fewer, "rows": facts["rows"]} == facts


def test_plan_is_for_the_device_that_is_asked_for() -> None:
    facts = run_json("plan", "tiny:llama", "--device", "ascend", "--dtype", "bf16")
    assert (facts["device"], facts["dtype"], facts["device_here"]) == ("npu", "bfloat16", False)
    assert "privateuseone" not in json.dumps(facts)  # PyTorch's name for what it doesn't know
    text = run("plan", "tiny:llama", "--device", "npu").output
    assert text.count("This machine has no npu: packages and hardware were judged as they are here.") == 1
    assert "This machine has no" not in run("plan", "tiny:llama", "--device", "cpu").output
    assert "this machine has no accelerator" in run("plan", "tiny:llama").output or torch.accelerator.is_available()


def test_plan_reads_a_folder_and_a_file_like_the_preset(saved_configs: Callable[[str], Path]) -> None:
    folder = saved_configs("llama")
    same = [run_json("plan", str(model)) for model in ("tiny:llama", folder, folder / "config.json")]
    for facts in same:
        del facts["model"]
    assert same[0] == same[1] == same[2]


def test_plan_prints_reasons_hidden_entries_and_what_is_not_covered() -> None:
    text = run("plan", "tiny:qwen3_vl", "--backend", "torch").output
    assert "qwen3_vl.Qwen3VLTextRMSNorm" in text
    assert "torch for swiglu: not registered (registered: npu, triton, liger, inductor)" in text
    assert "would install" in text and "installed" not in text
    assert "Not covered by any entry" in text and "Qwen3VLVisionMLP" in text
    assert "more entries name parts of other models" in text and "llama.LlamaRMSNorm" not in text
    assert "(--all lists them)" in text
    every = run("plan", "tiny:qwen3_vl", "--backend", "torch", "--all").output
    assert "llama.LlamaRMSNorm" in every and "more entries" not in every


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_config_alone_gives_the_class_of_its_family(name: str) -> None:
    source = models.ModelSource(name, config=presets.preset_config(name))
    assert type(source.on_meta(None)).__name__ == presets.PRESETS[name].model


def test_a_config_from_the_hub_is_taken_from_the_cache_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_configs: Callable[[str], Path]
) -> None:
    from huggingface_hub import constants

    cached = tmp_path / "models--someone--small"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_bytes((saved_configs("qwen2") / "config.json").read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_hub_answers", lambda endpoint: False)
    assert run_json("plan", "someone/small")["class"] == "Qwen2ForCausalLM"


def test_a_hub_that_does_not_answer_is_noticed_at_once() -> None:
    assert models._hub_answers("http://127.0.0.1:9") is False


def test_cutting_layers_cuts_what_has_one_value_a_layer() -> None:
    config = presets.preset_config("gemma2")
    cut_layers(config, 1)
    assert (config.num_hidden_layers, len(config.layer_types)) == (1, 1)
    vision_language = presets.preset_config("qwen3_vl")
    cut_layers(vision_language, 1)
    assert vision_language.text_config.num_hidden_layers == 1
    assert len(auto_class(config).from_config(config).model.layers) == 1


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG_USE = {
    "unknown preset": (["plan", "tiny:qwen33"], ["unknown preset 'qwen33'", "did you mean 'qwen3'?"]),
    "preset unlike any": (["plan", "tiny:zzzz"], ["unknown preset 'zzzz'", "known: cohere2"]),
    "folder without config": (["plan", "{tmp}"], ["has no config.json", "tiny:<preset>"]),
    "no such path": (["plan", "./nowhere"], ["no such file or folder: ./nowhere"]),
    "preset without prefix": (["plan", "qwen3"], ["did you mean tiny:qwen3?"]),
    "no Hub id": (["plan", "what is this"], ["no Hub id (owner/name)"]),
    "offline": (["plan", "nobody/nothing"], ["nobody/nothing", "can't be reached", "folder with config.json"]),
    "no JSON": (["plan", "{tmp}/broken.json"], ["can't be read as JSON"]),
    "no model config": (["plan", "{tmp}/other.json"], ["names no model_type"]),
    "unknown model type": (["plan", "{tmp}/new.json"], ["model type 'qwen99'", "pip install --upgrade transformers"]),
    "invalid value": (["plan", "{tmp}/invalid.json"], ["no valid qwen3 config", "hidden_size"]),
    "impossible model": (["plan", "{tmp}/impossible.json"], ["can't build this model", "ZeroDivisionError"]),
    "too large": (["verify", "{tmp}/huge.json"], ["billion parameters", "--layers"]),
    "unknown device": (["plan", "tiny:qwen3", "--device", "cdua"], ["unknown device 'cdua'", "did you mean 'cuda'?"]),
    "absent device": (["verify", "tiny:qwen3", "--device", "npu"], ["no device 'npu' here", "torch_npu", "info"]),
    "unknown backend": (["plan", "tiny:qwen3", "--backend", "tritn"], ["backend 'tritn'", "did you mean 'triton'?"]),
    "no backend": (["plan", "tiny:qwen3", "--backend", ","], ["--backend ','", "names nothing"]),
    "unknown dtype": (["verify", "tiny:qwen3", "--dtype", "bf61"], ["unknown dtype 'bf61'", "known: float32"]),
    "unwritable page": (["demo", "--html", "{tmp}/other.json/x.html"], ["--html", "name a file that can be written"]),
    "page in no folder": (["demo", "--html", "{tmp}/new/x.html"], ["there is no folder {tmp}/new", "make it first"]),
}
FILES = {
    "broken.json": "{",
    "other.json": '{"name": "something"}',
    "new.json": '{"model_type": "qwen99"}',
    "invalid.json": '{"model_type": "qwen3", "hidden_size": "x"}',
    "impossible.json": '{"model_type": "qwen3", "num_attention_heads": 0}',
    "huge.json": '{"model_type": "llama", "hidden_size": 65536, "num_hidden_layers": 100}',
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_is_one_line_with_the_remedy(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_hub_answers", lambda endpoint: False)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    arguments, fragments = WRONG_USE[case]
    result = run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("twinkle-kernel: ")
    assert all(fragment.replace("{tmp}", str(tmp_path)) in line for fragment in fragments), line


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (["plan", "tiny:qwen3"], ["verify", "tiny:qwen3"], ["demo"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "pip install 'twinkle-kernel[transformers]'" in result.stderr


@pytest.mark.parametrize("arguments", [["frobnicate"], ["plan"], ["verify", "tiny:qwen3", "--layers", "0"]])
def test_wrong_arguments_have_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


# --- what the commands share ------------------------------------------------------------------------------------------


def test_sizes_have_three_digits() -> None:
    assert [console.size(n) for n in (0, 999, 3_251_000, 56e9)] == ["0 B", "999 B", "3.25 MB", "56 GB"]
    assert [console.count(n) for n in (12, 132_000, 999_999, 30.5e9)] == ["12", "132k", "1M", "30.5B"]


def test_a_chain_may_be_repeated_and_hold_commas() -> None:
    assert options.parse_chain(["inductor, torch", "liger"]) == ("inductor", "torch", "liger")
    assert {choice.backends for choice in options.mapping_for(("torch",)).values()} == {("torch",)}


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"used": float("inf"), "all": [float("nan"), 0.5]})
    assert json.loads(capsys.readouterr().out) == {"used": None, "all": [None, 0.5]}


def test_find_model_keeps_what_the_user_wrote() -> None:
    assert find_model("tiny:qwen3") == models.ModelSource("tiny:qwen3", preset="qwen3")
