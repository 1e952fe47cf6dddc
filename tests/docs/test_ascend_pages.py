"""The page about Ascend: both languages say the same, and what it names is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twinkle.kernel import registry
from twinkle.kernel.ops.fla.library import ON_NPU
from twinkle.kernel.ops.rms_norm.npu import IN_FP32

ROOT = Path(__file__).parents[2]
LANGUAGES = ("en", "zh")


def page(language: str) -> str:
    return (ROOT / "docs" / language / "ascend.md").read_text(encoding="utf-8")


def rows(language: str) -> list[list[str]]:
    """What is quoted as code, cell by cell, of every line of every table."""
    lines = [line for line in page(language).splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"`([^`]+)`", line)) for line in lines]


def test_both_languages_say_the_same() -> None:
    assert rows("en") == rows("zh") and len(rows("en")) > 25
    headings = [re.findall(r"^(#+) ", page(language), re.MULTILINE) for language in LANGUAGES]
    blocks = [re.findall(r"```\w*\n.*?```", page(language), re.DOTALL) for language in LANGUAGES]
    assert headings[0] == headings[1] and blocks[0] == blocks[1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_op_and_every_function_is_named(language: str) -> None:
    text = page(language)
    table = text.partition("\n## ")[2].partition("\n## ")[0]
    ops = {op for cell in re.findall(r"^\| (`[^|]+)\|", table, re.MULTILINE) for op in re.findall(r"`(\w+)`", cell)}
    assert ops == {name for name, op in registry.ops().items() if "npu" in op.implementations}
    sources = [path.read_text() for path in (ROOT / "src/twinkle/kernel/ops").rglob("npu.py")]
    called = {name for source in sources for name in re.findall(r'npu_function\("(\w+)"\)', source)}
    told = set(re.findall(r"`(npu_\w+)`", table))
    assert told <= called and {name for name in called if not name.endswith(("_grad", "_backward"))} <= told


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_switches_are_those_of_the_code(language: str) -> None:
    assert set(re.findall(r"^\| `(TWINKLE_\w+)`", page(language), re.MULTILINE)) == {ON_NPU, IN_FP32}


def test_the_number_of_kinds_of_calls_is_that_of_the_tests() -> None:
    pytest.importorskip("transformers")
    from tests.support.attention import CASES

    numbers = [re.search(r"\| (\d+) (?:kinds of call|种调用)", page(language)) for language in LANGUAGES]
    assert [int(found[1]) for found in numbers if found] == [len(CASES)] * 2
