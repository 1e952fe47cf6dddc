"""What pages show is run, and both languages are in step: the READMEs, and every page of the documentation.

A block of Python runs after those before it on its page, and what it prints must stand behind the call, as in
``print(x)  # 3``. The lines of a block without a language are commands; ``text`` is what a program printed. A block
that can't run here says so in a comment before it: ``needs: …``, or ``run: FILE``, the test or program that runs it.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.support.markdown import LANGUAGES, ROOT, Block, blocks, headings, links, page, pages, prose, unread
from twinkle import presets
from twinkle.aten.registration import active
from twinkle.cli import app
from twinkle.kernel.ops import worthwhile
from twinkle.kernel.undo import unkernelize

READMES = {"en": "README.md", "zh": "README_ZH.md"}
NAMES = ["README", *pages("en")]
NEEDS = {
    "a clone and the network",
    "an Ascend NPU",
    "an NVIDIA GPU",
    "several accelerators",
    "vLLM",
    "a package of yours",
}
"""What this machine may lack."""

EXPECTED = re.compile(r"print\(.*\)  # (.*)$")


def text_of(language: str, name: str) -> str:
    return (ROOT / READMES[language]).read_text(encoding="utf-8") if name == "README" else page(language, name)


# --- both languages ---------------------------------------------------------------------------------------------------


def without_comments(block: Block) -> str:
    """A block's code, with the comments that say what is printed."""
    lines = []
    for line in block.text.splitlines():
        code, _, said = line.partition("  #") if block.kind or "  #" in line else (line, "", "")
        lines.append(line if EXPECTED.search(line) else code.rstrip() if said else line)
    return "\n".join(line for line in lines if not line.lstrip().startswith("# "))


def test_both_languages_have_the_same_pages() -> None:
    assert pages("en") == pages("zh")
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    assert sorted(name for entry in navigation for name in entry.values()) == pages("en")


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_headings(name: str) -> None:
    levels = [[level for level, _ in headings(text_of(language, name))] for language in LANGUAGES]
    assert levels[0] == levels[1]


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_code(name: str) -> None:
    english, chinese = (blocks(text_of(language, name)) for language in LANGUAGES)
    assert [(b.kind, b.run, b.needs) for b in english] == [(b.kind, b.run, b.needs) for b in chinese]
    for one, other in zip(english, chinese, strict=True):
        assert without_comments(one) == without_comments(other), f"lines {one.line} and {other.line}"


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_links_and_tables(name: str) -> None:
    def shape(language: str) -> tuple[list[str], list[int]]:
        text = text_of(language, name)
        targets = [link.partition("#")[0].replace("docs/zh/", "docs/en/") for link in links(text)]
        rows = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
        return sorted(set(targets) - {*READMES.values()}), rows

    assert shape("en") == shape("zh")


HAN = "[\u3400-\u9fff]"


@pytest.mark.parametrize("name", NAMES)
def test_chinese_has_chinese_punctuation(name: str) -> None:
    text = re.sub(r"`+[^`]*`+|\]\([^)\s]*\)|<!--.*?-->|!(?=\[)", "]", prose(text_of("zh", name)))
    assert re.findall(rf".*{HAN}[*\]]*[,:;?!()].*|.*[,:;?!()][*\[]*{HAN}.*", text) == []


# --- Python -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _nothing(tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield {}


@contextlib.contextmanager
def _trainer(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the page about trainers takes for granted."""
    transformers = pytest.importorskip("transformers")
    state = pytest.importorskip("accelerate.state")
    row = torch.arange(3, 259).repeat(2)[:512] % 250 + 3
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    yield {"model": presets.build("qwen3"), "dataset": [{"input_ids": row, "labels": row}] * 8, "arguments": arguments}
    state.AcceleratorState._reset_state(reset_partial_state=True)  # it is set up once for a whole process


@contextlib.contextmanager
def _group(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    names: dict[str, Any] = {}
    try:
        yield names
        assert all(parameter.grad is not None for parameter in names["model"].parameters())
    finally:
        distributed.destroy_process_group()


SETUPS: dict[str, Callable[[Path], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "engines.md": _trainer,
    "cookbook.md": _group,
}


def run(block: Block, names: dict[str, Any], name: str) -> None:
    """Runs a block of Python.

    Raises:
        AssertionError: something else was printed than stands behind the call.
    """
    lines = block.text.splitlines()
    printed: dict[int, str] = {}

    def noted(*values: Any, **options: Any) -> None:
        line = sys._getframe(1).f_lineno - block.line
        printed[line] = " ".join(map(str, values))

    code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
    names["print"] = noted
    exec(compile(code, name, "exec"), names)
    expected = {number: found[1] for number, line in enumerate(lines) if (found := EXPECTED.search(line))}
    assert {number: printed.get(number) for number in expected} == expected, name


@pytest.fixture
def as_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls are left to the originals, and the Hub is out of reach."""
    monkeypatch.setattr(worthwhile, "_every_size", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


PYTHON = [name for name in NAMES if any(block.kind == "python" for block in blocks(text_of("en", name)))]


@pytest.mark.usefixtures("as_outside", "own_registry")
@pytest.mark.parametrize("name", PYTHON)
def test_python_runs_and_prints_what_stands_beside_it(name: str, tmp_path: Path) -> None:
    """In English: the code of the other language is the same."""
    with SETUPS.get(name, _nothing)(tmp_path) as names:
        names["__name__"] = "page"
        try:
            for block in blocks(text_of("en", name)):
                if block.kind == "python" and not block.needs:
                    run(block, names, name)
            assert active() == []
        finally:
            for value in names.values():
                if isinstance(value, torch.nn.Module):
                    unkernelize(value)


def test_another_print_is_noticed() -> None:
    block = Block("python", "x = 1\nprint(x)  # 1\nfor x in (2, 3):\n    print(x)  # 3\n", 7)
    run(block, {}, "page")
    with pytest.raises(AssertionError):
        run(Block("python", "x = 1\nprint(x)  # 2\n", 7), {}, "page")
    with pytest.raises(AssertionError):
        run(Block("python", "if False:\n    print(1)  # 1\n", 7), {}, "page")


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_seen(name: str) -> None:
    assert {language: unread(text_of(language, name)) for language in LANGUAGES} == {"en": [], "zh": []}


@pytest.mark.parametrize(
    "block",
    ["~~~python\n1/0\n~~~", "```{.python}\n1/0\n```", "- item\n\n  ```python\n  1/0\n  ```", "    1/0", "> ```\n> 1/0"],
)
def test_a_block_that_nothing_would_run_is_found(block: str) -> None:
    page = f"# Page\n\n```python\nx = 1\n\n    # 2\n```\n\n{block}\n\nAfter.\n"
    assert unread(page), "it would be shown and never run"
    assert unread(page.replace(block, "- item\n\n    - another\n")) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_block_says_who_runs_it(name: str) -> None:
    for block in blocks(text_of("en", name)):
        where = f"{name}:{block.line}"
        assert block.kind in ("", "python") or (block.kind == "text" and (block.run or block.needs)), where
        assert block.needs is None or block.needs in NEEDS, where
        if block.run is not None:
            ran = (ROOT / block.run).read_text(encoding="utf-8")
            assert block.run == ".ci/run" or Path(block.run).name.startswith("test_"), where
            for command in block.commands if not block.kind else ():
                assert re.search(rf"\b{_word(command)}\b", ran), f"{where}: {block.run} doesn't run {command}"


def _word(command: str) -> str:
    """What a test that runs a command must mention: the file, the target or the subcommand."""
    words = command.split()
    file = next((Path(word).stem for word in words if word.endswith((".py", ".sh"))), None)
    module = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else None
    return file or module or words[1]


RUN = [
    (name, command)
    for name in NAMES
    for block in blocks(text_of("en", name))
    if not (block.kind or block.run or block.needs)
    for command in block.commands
]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(("name", "command"), RUN)
def test_a_command_runs(name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = command.split()
    if program == "twinkle-kernel":
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return
    assert program == "python", f"{name}: nothing here can run {command!r}: say who does, or what it needs"
    ran = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
