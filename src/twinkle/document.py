"""What a report for people is made of: data. :mod:`twinkle.layout` makes text of it, :mod:`twinkle.page` HTML.

A style is one of rich's: ``"bold"``, ``"dim"``, ``"red"``, ``"yellow"``; none when empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Some distance: in text an empty line."""


@dataclass(frozen=True)
class Heading:
    """Of what follows."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; nothing where the text is empty."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Points:
    """A list: (what, what there is to say about it)."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of cells below a header; ``-`` is an empty cell.

    Attributes:
        columns: the header.
        rows: each as many cells as there are columns.
        numbers: names of the columns to align on the right.
        styles: the rows' styles; none when empty.
        labels: how many columns at the left say what a row is about.
        word: the column that says in words what the style says in colour; empty when none does. In such a table a row
            without a style is one about which all is well.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    styles: Sequence[str] = ()
    labels: int = 1
    word: str = ""


@dataclass(frozen=True)
class Code:
    """Something to copy: its lines, where so many columns are there."""

    lines: Callable[[int], list[str]]


@dataclass(frozen=True)
class Bar:
    """One bar of a chart.

    Attributes:
        name: whose value it is.
        value: where the bar ends.
        text: the value in words.
        low, high: where the true value lies; None where that isn't known.
        style: as that of a table's row with a ``word``.
    """

    name: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    style: str = ""


@dataclass(frozen=True)
class BarChart:
    """Bars that begin at 0, of a page only: a table of the same report has the figures.

    Attributes:
        title: what is shown, with its unit.
        bars: from top to bottom.
        legend: how to read it.
        band: values between minus and plus this don't count.
        limit: what no value should exceed.
        ends: no bar is drawn further than this, to either side.
    """

    title: str
    bars: Sequence[Bar]
    legend: str = ""
    band: float = 0.0
    limit: float | None = None
    ends: float = float("inf")


Part = Gap | Heading | Text | Points | Table | Code | BarChart
GAP = Gap()
