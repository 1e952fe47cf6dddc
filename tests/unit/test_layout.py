"""Text laid out for a width."""

from __future__ import annotations

import pytest

from twinkle.layout import EMPTY_LINE, Block, paragraph, plain, table, width_of_terminal

HEADER = ("target", "state", "sites")
ROWS = [("a.long.name", "installed", "9"), ("b", "-", "12")]


def lines(width: int, **options: list[str]) -> list[str]:
    return plain(table(HEADER, ROWS, width, numbers=("sites",), **options)).splitlines()


def test_columns_side_by_side_where_they_fit() -> None:
    assert lines(29) == [
        "target       state      sites",
        "a.long.name  installed      9",
        "b            -             12",
    ]


def test_the_first_cell_above_the_others_where_they_do_not() -> None:
    stacked = ["target", "  state      sites", "a.long.name", "  installed      9", "b", "  -             12"]
    assert lines(28) == lines(18) == stacked


def test_names_and_values_where_nothing_fits() -> None:
    assert lines(17) == ["a.long.name", "  state: installed,", "    sites: 9", "b", "  sites: 12"]


def test_a_block_has_its_rows_style() -> None:
    for width in (29, 18):
        assert [block.style for block in table(HEADER, ROWS, width, styles=["", "dim"])] == ["header", "", "dim"]
    assert [block.style for block in table(HEADER, ROWS, 10, styles=["", "dim"])] == ["", "dim"]


def test_a_header_is_as_wide_as_its_table() -> None:
    assert [len(line) for line in table(HEADER, ROWS, 40)[0].lines] == [29]


def test_a_paragraph_breaks_between_words_only() -> None:
    assert paragraph("one two-three four", 10, indent=2) == ["  one", "    two-three", "    four"]
    assert paragraph("", 10) == [] and paragraph("a.very.long.name", 3) == ["a.very.long.name"]


def test_plain_text_has_no_trailing_spaces() -> None:
    assert plain([Block(["a  ", "b"], "dim"), EMPTY_LINE, Block(["c"])]) == "a\nb\n\nc"


@pytest.mark.parametrize(("columns", "expected"), [("77", 77), ("0", 120), ("wide", 120)])
def test_the_width_of_the_terminal(columns: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    assert width_of_terminal() == expected
