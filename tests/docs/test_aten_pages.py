"""The pages about the ATen level: what they show is run, and their tables are what is measured."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.aten.uses import CALLS
from twinkle.aten import routes
from twinkle.aten.registration import active

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGES = ("en", "zh")


def page(language: str) -> str:
    return (DOCS / language / "aten.md").read_text(encoding="utf-8")


def code(language: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(language), re.DOTALL)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_code_runs_and_prints_what_stands_beside_it(language: str) -> None:
    names: dict[str, object] = {}
    for block in code(language):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"aten.md ({language})", "exec"), names)
        assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)  # (.*)", block)
    assert active() == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_table_of_compiled_calls_is_what_the_tests_measure(language: str) -> None:
    cell = r"(\d|fails|失败)"
    rows = re.findall(rf"^\| `(\w+)` \| {cell} \| {cell} \| {cell} \|$", page(language), re.MULTILINE)
    numbers = [(name, *(int(n) if n.isdigit() else None for n in cells)) for name, *cells in rows]
    shown = {name: dict(zip(("eager", "aot_eager", "inductor"), n, strict=True)) for name, *n in numbers}
    assert shown == CALLS


def test_both_languages_say_the_same() -> None:
    english, chinese = (re.sub(r"#.*", "", "".join(code(language))) for language in LANGUAGES)
    assert english == chinese
    shapes = [
        [line.partition(" ")[0] for line in page(language).splitlines() if line[:1] == "#"] for language in LANGUAGES
    ]
    assert shapes[0] == shapes[1]
    links = [re.findall(r"\]\(([^)]+)\)", page(language)) for language in LANGUAGES]
    assert links[0] == links[1]
    for link in links[0]:
        assert (DOCS / "en" / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_codes_of_routes_are_explained(language: str) -> None:
    for code in (routes.SMALL, routes.UNMEASURED, f"{routes.SLOWER}-contiguous"):
        assert f"`{code}`" in page(language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_programs_and_files_that_are_named_are_there(language: str) -> None:
    root = DOCS.parent
    for file in re.findall(r"python ((?:ops|script)/[\w/]+\.py)", page(language)):
        assert (root / file).is_file(), file
    for program in re.findall(r"python -m (benchmarks\.\w+)", page(language)):
        assert (root / f"{program.replace('.', '/')}.py").is_file(), program
