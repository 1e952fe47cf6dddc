"""Reading pages as a browser would."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "line", "polyline", "circle", "rect", "br", "wbr"}
BLOCKS = {"h1", "h2", "p", "li", "tr", "figcaption", "div", "footer", "pre", "title", "figure"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use"}


class Reader(HTMLParser):
    """Collects tags and attributes, and the text line by line; an unbalanced tag fails."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in BLOCKS:
            self.text += "\n"
        elif tag in ("td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data if "pre" in self.open else re.sub(r"\s+", " ", data)

    def lines(self) -> list[str]:
        """The text, words one space apart."""
        return [line for line in (" ".join(line.split()) for line in self.text.splitlines()) if line]

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every such tag."""
        return [attributes for name, attributes in self.tags if name == tag]


def read_alone(source: str) -> Reader:
    """A page that must load nothing and run nothing, and be made for a phone too."""
    reader = Reader(source)
    names = {tag for tag, _ in reader.tags}
    assert not names & LOADING
    attributes = {name for _, attributes in reader.tags for name in attributes}
    assert not {"src", "href", "srcset", "xlink:href"} & attributes
    assert not [name for name in attributes if name.startswith("on")]
    for loading in ("http:", "https:", "url(", "@import"):
        assert loading not in source
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.of("meta")
    return reader
