"""A report's parts as one HTML file: nothing else is loaded, no script runs, and it can be read on a phone.

The markup is in ``page.html``, which escapes every text that it is given.
"""

from __future__ import annotations

import datetime
import platform
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import twinkle
from twinkle.document import BarChart, Code, Part

if TYPE_CHECKING:
    from markupsafe import Markup

CODE_WIDTH = 88
"""Columns for what is there to be copied. On a phone its lines are broken for the eye, and copied whole."""


def page(title: str, parts: Iterable[Part], packages: str = "") -> str:
    """The whole document.

    Args:
        title: its heading, and what the browser's tab says.
        parts: what follows.
        packages: names and versions that the foot has, besides ours and Python's.
    """
    now = datetime.datetime.now().astimezone()
    foot = (
        f"Written on {now:%Y-%m-%d %H:%M %Z} by twinkle-kernel {twinkle.__version__}; "
        f"{', '.join(filter(None, [f'Python {platform.python_version()}', packages]))}."
    )
    return document(title, _macros().heading(title) + html_of(parts) + _macros().foot(foot))


def document(title: str, body: Markup, style: str = "") -> str:
    """A document of a body that is markup already.

    Args:
        title: what the browser's tab says.
        style: CSS beside that of the parts.
    """
    return str(_macros().document(title, body, style)) + "\n"


def html_of(parts: Iterable[Part]) -> Markup:
    """The parts' markup, for a document."""
    from markupsafe import Markup

    return Markup("\n").join(_macro(part)(_given(part)) for part in parts)


def _macro(part: Part) -> Any:
    return getattr(_macros(), type(part).__name__)


def _given(part: Part) -> Any:
    match part:
        case BarChart():
            return _drawn(part)
        case Code(lines):
            return textwrap.dedent("\n".join(lines(CODE_WIDTH)))
    return part


@cache
def _macros() -> Any:
    """The template's macros, as attributes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("twinkle", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").module


def _drawn(chart: BarChart) -> dict[str, Any]:
    """A chart with positions in percent of its width."""
    extent = [0.0, -chart.band, chart.band, *([] if chart.limit is None else [chart.limit * 1.05])]
    for bar in chart.bars:
        extent += [value for value in (bar.value, bar.low, bar.high) if value is not None]
    least, most = (min(max(value, -chart.ends), chart.ends) for value in (min(extent), max(extent)))

    def at(value: float) -> float:
        return round((min(max(value, least), most) - least) / ((most - least) or 1.0) * 100, 2)

    def span(low: float, high: float) -> tuple[float, float]:
        return at(low), round(at(high) - at(low), 2)

    bars = [
        {
            "bar": bar,
            "span": span(min(bar.value, 0.0), max(bar.value, 0.0)),
            "between": None if bar.low is None or bar.high is None else (at(bar.low), at(bar.high)),
        }
        for bar in chart.bars
    ]
    return {
        "chart": chart,
        "bars": bars,
        "zero": at(0.0),
        "band": span(-chart.band, chart.band) if chart.band else None,
        "limit": None if chart.limit is None else at(chart.limit),
    }
