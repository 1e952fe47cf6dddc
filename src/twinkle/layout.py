"""Text for people, laid out for a width: blocks of lines. A terminal shows each in its style, plain text has none."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from twinkle.document import Code, Gap, Heading, Part, Points, Table, Text

WITHOUT_TERMINAL = 120
"""Columns where nothing says how many there are: in a pipe, a file or a notebook."""


@dataclass(frozen=True)
class Block:
    """Lines that belong together.

    Attributes:
        lines: at most as wide as was asked for, unless a single word is wider.
        style: ``"header"`` (of a table), or a style of rich such as ``"dim"``.
    """

    lines: list[str]
    style: str = ""


_NO_BREAK = "\N{NO-BREAK SPACE}"
EMPTY_LINE = Block([""])


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as one string without styles."""
    return "\n".join(line.rstrip() for block in blocks for line in block.lines)


def laid_out(parts: Iterable[Part], width: int) -> Iterator[Block]:
    """A report's parts as blocks of at most ``width`` columns, but for what is there to be copied; without charts."""
    for part in parts:
        match part:
            case Gap():
                yield EMPTY_LINE
            case Heading(text):
                yield Block(paragraph(text, width), "bold")
            case Text(text, style):
                yield Block(paragraph(text, width), style)
            case Points(items):
                yield from (Block(paragraph(f"{what}: {said}", width, indent=2)) for what, said in items)
            case Table():
                yield from _table_of(part, width)
            case Code(lines):
                yield Block(lines(width), "cyan")


def _table_of(part: Table, width: int) -> list[Block]:
    """Of several labels one cell is made, so that they stay together where the table is too wide."""
    left = [row[: part.labels] for row in (part.columns, *part.rows)]
    widths = [max(map(len, column)) for column in zip(*left, strict=True)]
    joined = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in left]
    rows = [(label, *row[part.labels :]) for label, row in zip(joined[1:], part.rows, strict=True)]
    return table((joined[0], *part.columns[part.labels :]), rows, width, numbers=part.numbers, styles=part.styles)


def width_of_terminal() -> int:
    """The terminal's columns; the variable COLUMNS overrules it."""
    return shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns


def paragraph(text: str, width: int, indent: int = 0) -> list[str]:
    """``text`` wrapped between words, further lines two columns to the right. Names and paths are never broken."""
    first = " " * indent
    return textwrap.wrap(
        text,
        max(width, 1),
        initial_indent=first,
        subsequent_indent=f"{first}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    numbers: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> list[Block]:
    """One block per row, after that of the header.

    Columns are aligned. Where they don't fit side by side, the first cell gets a line of its own above the others;
    where those don't fit either, they become a paragraph of ``name: value`` (``-`` is left out) and there is no header.

    Args:
        header: the columns' names.
        rows: the cells of each row.
        width: columns of the terminal or page.
        numbers: names of the columns to align on the right.
        styles: the rows' styles; none when empty.
    """
    styles = ["header", *(styles or [""] * len(rows))]
    cells = [header, *rows]
    lines = _aligned(cells, numbers)
    if len(lines[0]) <= width:
        return [Block([line], style) for line, style in zip(lines, styles, strict=True)]
    lines = _aligned([row[1:] for row in cells], numbers)
    if len(lines[0]) + 2 <= width:
        stacked = [[row[0], f"  {line}"] for row, line in zip(cells, lines, strict=True)]
        return [Block(pair, style) for pair, style in zip(stacked, styles, strict=True)]
    return [Block(_card(header, row, width), style) for row, style in zip(rows, styles[1:], strict=True)]


def _aligned(rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> list[str]:
    """The rows, of which the first is the header, as lines of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if name in numbers else str.ljust for name in rows[0]]
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(pads, row, widths, strict=True)) for row in rows]


def _card(header: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    pairs = [f"{name}:{_NO_BREAK}{cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell != "-"]
    return [row[0], *(line.replace(_NO_BREAK, " ") for line in paragraph(", ".join(pairs), width, indent=2))]
