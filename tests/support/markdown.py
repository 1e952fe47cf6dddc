"""Reading pages of Markdown: their headings, links and fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("en", "zh")

FENCED = re.compile(
    r"(?:^<!-- (?P<how>run|needs): (?P<what>[^\n]+?) -->\n+)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: the language; empty for commands.
        text: what is in it.
        line: the page's line on which the text begins.
        run: the file that runs it, when a comment before it says so.
        needs: what it needs and the tests haven't got, when a comment says so.
    """

    kind: str
    text: str
    line: int
    run: str | None = None
    needs: str | None = None

    @property
    def commands(self) -> list[str]:
        """The lines without comments."""
        lines = (re.sub(r"\s+#.*", "", line).strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: str) -> list[Block]:
    """All of them, in order."""
    found = []
    for match in FENCED.finditer(page):
        line = page.count("\n", 0, match.start("text")) + 1
        how = {match["how"]: match["what"]} if match["how"] else {}
        found.append(Block(match["kind"], match["text"], line, how.get("run"), how.get("needs")))
    return found


def unread(page: str) -> list[str]:
    """Lines that begin a block of code which :func:`blocks` doesn't see: fenced in another way, indented, in a list."""
    fences = r"^[ \t>]*(?:```|~~~).*|(?<=\n\n)(?: {4}|\t)(?! *[-*] ).*"
    return re.findall(fences, prose(page), re.MULTILINE)


def prose(page: str) -> str:
    """The page without fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)


def headings(page: str) -> list[tuple[int, str]]:
    """Level and text of each."""
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) +(.*?) *$", prose(page), re.MULTILINE)]


def links(page: str) -> list[str]:
    """Where links and pictures lead, code left out."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [next(filter(None, found)) for found in LINK.findall(text)]


def pages(language: str) -> list[str]:
    """Names of the documentation's pages in a language."""
    return sorted(path.name for path in (ROOT / "docs" / language).glob("*.md"))


def page(language: str, name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / language / name).read_text(encoding="utf-8")
