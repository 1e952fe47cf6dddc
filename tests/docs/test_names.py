"""What texts name is there: documentation, training scripts, help texts. A name that is gone is found here."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle.cli import app

ROOT = Path(__file__).parents[2]

TEXTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "cookbook/**/*",
        "benchmarks/*.py",
        "src/**/*.py",
        "ops/**/*.md",
        "Makefile",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in (".md", ".py", ".sh", "")
)

GONE = {
    "npu_builtin": "a backend is called npu",
    "liger_builtin": "a backend is called liger",
    "ep_experts": "experts that are shared are computed by moe_experts",
    "--no-fused-ce": "without --enable-liger there is no fused loss",
    "--enable-fused-ce": "the option is called --enable-liger",
    "TWINKLE_ENABLE_LIGER": "the option is called --enable-liger",
    "MixtralBlockSparseTop2MLP": "transformers 5 calls it MixtralExperts",
    "Qwen3_5GatedRMSNorm": "transformers 5 calls it Qwen3_5RMSNormGated",
    "InternVLRMSNorm": "transformers 5 calls it InternVLVisionRMSNorm",
}
"""Names that similar programs have or had, and people look for."""

COMMANDS = ("info", "plan", "verify", "bench", "demo", "ops")


def _texts() -> Iterator[tuple[str, str]]:
    for path in TEXTS:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for command in COMMANDS:
        said = CliRunner().invoke(app, [command, "--help"])
        assert said.exit_code == 0 and "Usage" in said.output
        yield f"twinkle-kernel {command} --help", said.output


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = dict(_texts())
    assert {"README.md", "docs/zh/cookbook.md", "cookbook/transformers/fsdp2.sh"} <= found.keys()
    return found


def _named(texts: dict[str, str], pattern: str) -> dict[str, str]:
    """Name -> one of the texts that have it."""
    return {name: where for where, text in texts.items() for name in re.findall(pattern, text)}


def test_no_text_has_a_name_that_is_gone(texts: dict[str, str]) -> None:
    assert {(where, name) for where, text in texts.items() for name in GONE if name in text} == set()


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if found:
            value = importlib.import_module(module)
            for attribute in parts[end:]:
                if not hasattr(value, attribute):
                    return False
                value = getattr(value, attribute)
            return True
    return False


def test_dotted_names_lead_somewhere(texts: dict[str, str]) -> None:
    written = {where: text for where, text in texts.items() if not where.startswith(("src/", "ops/"))}
    named = _named(written, r"\b(twinkle\.[a-z]\w*(?:\.\w+)*)")
    entry_points = {"twinkle.kernel_ops", "twinkle.aten_ops"}
    assert "twinkle.moe" in named and "twinkle.kernel.undo" in named
    assert {name: where for name, where in named.items() if name not in entry_points and not _exists(name)} == {}


def test_paths_lead_somewhere(texts: dict[str, str]) -> None:
    written = {where: text for where, text in texts.items() if not where.startswith("src/")}
    roots = "src|ops|configs|cookbook|benchmarks|docs|tests|constraints"
    named = _named(written, rf"(?<![\w./-])((?:{roots})/[\w./-]*\w)")
    assert "cookbook/transformers/ep_fsdp2_lora_qwen3_moe.sh" in named
    results = re.compile(r"benchmarks/results/\w+/\w+\.json")  # what a command will write
    missing = {name: where for name, where in named.items() if not (ROOT / name).exists() and not results.match(name)}
    assert missing == {}


def test_targets_of_make_and_programs_are_there(texts: dict[str, str]) -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for targets, where in _named(texts, r"`make ([a-z -]+)`").items():
        assert set(targets.split()) <= rules, where
    for program, where in _named(texts, r"python3? -m benchmarks\.(\w+)").items():
        assert (ROOT / "benchmarks" / f"{program}.py").exists(), where
    for command, where in _named(texts, r"`twinkle-kernel (\w+)").items():
        assert command in COMMANDS, where


def test_variables_of_the_environment_are_read(texts: dict[str, str]) -> None:
    code = "\n".join(
        path.read_text() for folder in ("src", "tests", "cookbook") for path in ROOT.glob(f"{folder}/**/*.py")
    )
    for name, where in _named(texts, r"\b(TWINKLE_[A-Z_]+)\b").items():
        assert f'"{name}"' in code, where


def test_options_of_the_scripts_are_there(texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pages about the scripts, in the scripts, and in what they say of each other."""
    monkeypatch.syspath_prepend(str(ROOT / "cookbook" / "transformers"))
    settings = importlib.import_module("settings")
    del sys.modules["settings"]
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings.ExpertSettings)}
    torchrun = {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--nproc-per-node"}
    about = {
        where: re.sub(r"python -m benchmarks.*", "", text)  # has options of its own
        for where, text in texts.items()
        if where.startswith("cookbook/") or "cookbook.md" in where
    }
    named = _named(about, r"(?<![\w-])(--[a-z][\w-]*)")
    assert {"--ep-size", "--enable-liger"} <= named.keys()
    assert {name: where for name, where in named.items() if name not in known | torchrun | {"--help"}} == {}
    assert all(field.metadata.get("help") for field in dataclasses.fields(settings.ExpertSettings))
