"""The pages about engines and trainers: what they show is run, and both languages say the same."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from twinkle import presets
from twinkle.engines import activation
from twinkle.kernel.report import report

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGES = ("en", "zh")


def page(language: str) -> str:
    return (DOCS / language / "engines.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[str, str]]:
    """Kind and text of each, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page(language), re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_code_runs_and_prints_what_stands_beside_it(language: str, tmp_path: Path) -> None:
    model = presets.build("qwen3")
    row = torch.arange(3, 27)
    names: dict[str, object] = {
        "model": model,
        "dataset": [{"input_ids": row, "labels": row}],
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
        ),
    }
    for block in (text for kind, text in blocks(language) if kind == "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"engines.md ({language})", "exec"), names)
        shown = re.findall(r"print\(.*\)  # (.*)", block)
        assert [line for line in printed.getvalue().splitlines() if line[:1] != "{"] == shown
    assert report(model).rows == []
    assert "fused_ce" in names["mapping"] and not any("rotary" in str(key) for key in names["mapping"])  # type: ignore[operator,attr-defined]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_variable_is_there(language: str) -> None:
    shown = re.findall(r"^\| `(TWINKLE_\w+)` \|", page(language), re.MULTILINE)
    assert shown == [activation.OPERATORS, activation.PLATFORM, activation.FOLDER, activation.ON_ERROR]


def test_both_languages_say_the_same() -> None:
    assert blocks("en") == blocks("zh") and len(blocks("en")) == 6
    shapes = [
        [line.partition(" ")[0] for line in page(language).splitlines() if line[:1] in ("#", "|")]
        for language in LANGUAGES
    ]
    assert shapes[0] == shapes[1]
    links = [re.findall(r"\]\(([^)#]+)", page(language)) for language in LANGUAGES]
    assert links[0] == links[1]
