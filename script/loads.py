"""What a page of HTML loads from other hosts: pictures, scripts, styles, fonts, films. A link isn't loaded."""

from __future__ import annotations

import re
from html.parser import HTMLParser

LOADING = ("src", "srcset", "poster", "background")
"""Attributes that load in any element."""

BY_ELEMENT = {"object": ("data",), "link": ("href", "imagesrcset"), "use": ("href", "xlink:href")}
BY_ELEMENT["image"] = BY_ELEMENT["use"]

UNLOADED = {"alternate", "author", "canonical", "license", "next", "prev"}
"""Relations of a ``link`` that only name something."""

FOREIGN = re.compile(r"(?:^|[\s,])(?:\w+:)?//")
FOREIGN_STYLE = re.compile(r"(?:@import\s*|url\(\s*)[\"']?\s*(?:\w+:)?//[^\s\"')]*", re.IGNORECASE)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        values = {name: value for name, value in attrs if value}
        self.found += FOREIGN_STYLE.findall(values.get("style", ""))
        if tag == "link" and set(values.get("rel", "").lower().split()) & UNLOADED:
            return
        for name in (*LOADING, *BY_ELEMENT.get(tag, ())):
            if FOREIGN.search(values.get(name, "")):
                self.found.append(f"<{tag} {name}={values[name]}>")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += FOREIGN_STYLE.findall(data)


def foreign(html: str) -> list[str]:
    """What a page loads from other hosts, in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.found
