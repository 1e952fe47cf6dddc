"""The pages about the ATen level: their tables are what is measured, and what they name is there."""

from __future__ import annotations

import re

import pytest

from tests.aten.uses import CALLS
from tests.support.markdown import LANGUAGES, ROOT
from tests.support.markdown import page as any_page
from twinkle.aten import catalog, routes


def page(language: str) -> str:
    return any_page(language, "aten.md")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_table_of_compiled_calls_is_what_the_tests_measure(language: str) -> None:
    cell = r"(\d|fails|失败)"
    rows = re.findall(rf"^\| `(\w+)` \| {cell} \| {cell} \| {cell} \|$", page(language), re.MULTILINE)
    numbers = [(name, *(int(n) if n.isdigit() else None for n in cells)) for name, *cells in rows]
    shown = {name: dict(zip(("eager", "aot_eager", "inductor"), n, strict=True)) for name, *n in numbers}
    assert shown == CALLS


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_codes_of_routes_are_explained(language: str) -> None:
    for code in (routes.SMALL, routes.UNMEASURED, f"{routes.SLOWER}-contiguous"):
        assert f"`{code}`" in page(language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_kinds_of_calls_are_explained(language: str) -> None:
    named = {kind for name in catalog.names() for kind in catalog.operator(name).work.samples} - {routes.ANY}
    orders = {kind.removeprefix("wide ") for kind in named}
    assert orders < named and "wide transposed" in named
    assert not [kind for kind in (*orders, "wide transposed") if f"`{kind}`" not in page(language)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_programs_and_files_that_are_named_are_there(language: str) -> None:
    for file in re.findall(r"python ((?:ops|script)/[\w/]+\.py)", page(language)):
        assert (ROOT / file).is_file(), file
    for program in re.findall(r"python -m (benchmarks\.\w+)", page(language)):
        assert (ROOT / f"{program.replace('.', '/')}.py").is_file(), program
