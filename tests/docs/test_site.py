"""What the documentation's site is checked for while it is built."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.support.markdown import ROOT


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "script"))
    return importlib.import_module("loads")


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        "<img alt=x src=//example.org/a.png>",
        "<IMG SRCSET='a.png 1x, https://example.org/a.png 2x'>",
        '<video poster="https://example.org/a.png"></video>',
        '<object data="https://example.org/a.svg"></object>',
        '<svg><use xlink:href="https://example.org/a.svg#b"/></svg>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<link rel="preconnect" href="https://example.org">',
        "<style>@import 'https://example.org/a.css';</style>",
        '<p style="background: url( //example.org/a.png )">',
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(html: str, loads: ModuleType) -> None:
    (found,) = loads.foreign(f"<p>x</p>{html}<p>y</p>")
    assert "//example.org" in found


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://example.org">x</a>',
        '<link rel="canonical" href="https://example.org/x">',
        '<img src="a.png"><script src="../a.js"></script><link rel="stylesheet" href="a.css">',
        "<code>&lt;img src=&quot;https://example.org&quot;&gt; url(https://example.org)</code>",
        "<style>p { background: url(a.png) } /* https://example.org */</style>",
    ],
)
def test_a_link_loads_nothing(html: str, loads: ModuleType) -> None:
    assert loads.foreign(html) == []
