"""Bar and line charts as SVG files that need nothing else: no script, no font, no style sheet.

Written here rather than by a plotting library because the same figures must give the same bytes everywhere: a test
compares the committed files with what the committed results give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 760, 230, 74, 13, 12, 40

# Who -> colour on light and on dark ground. Ours are warm, what is compared with them cool.
COLOURS = {
    "hf": ("#9aa5b3", "#77818f"),
    "F.rms_norm": ("#9cc4e4", "#6d9cc0"),
    "torch": ("#5b8fd0", "#6f9fdd"),
    "inductor": ("#8a7fc0", "#a299d6"),
    "compile": ("#8a7fc0", "#a299d6"),
    "liger": ("#5aa795", "#6cbcaa"),
    "triton": ("#c8442c", "#ff8f6b"),
    "twinkle": ("#c8442c", "#ff8f6b"),
    "twinkle+fused_ce": ("#e07a3a", "#ffb067"),
    "twinkle+fused": ("#a83a5b", "#f08fae"),
    "twinkle+fused+fused_ce": ("#d9567d", "#ffb3cb"),
    "twinkle+fused+fused_ce+compile": ("#7a1f3d", "#f7cfdc"),
    "twinkle+compile": ("#8c2615", "#ffb79f"),
    "twinkle+fused_ce+compile": ("#6a3d1a", "#f3cfa6"),
}
OTHER = ("#b58b3c", "#d0a95c")
OTHERS = (
    *(OTHER, ("#2f6fb5", "#6f9fdd"), ("#2f8f78", "#6cbcaa"), ("#6a5fb0", "#a299d6"), ("#c8442c", "#ff8f6b")),
    *(("#9a4f8f", "#d58fca"), ("#6f7a2c", "#b3c15e"), ("#5f6b7a", "#aab4c0")),
)
"""Of names that have no colour of their own, in turns."""

Group = tuple[str, Sequence[tuple[str, float]]]


def bar_chart(title: str, groups: Sequence[Group], *, unit: str, full: float | None = None, digits: int = 0) -> str:
    """Horizontal bars, one per candidate, under the name of what was measured.

    Args:
        title: what it shows, for those who can't see it.
        groups: ``(name, [(who, value), ...])``; values are positive.
        unit: written behind each value.
        full: where a line marks what can be reached at best.
        digits: of a value, after the point.
    """
    several = any(len(bars) > 1 for _, bars in groups)  # else each bar's name stands beside it
    whos = list(dict.fromkeys(who for _, bars in groups for who, _ in bars))
    largest = max([value for _, bars in groups for _, value in bars] + ([full] if full else []))
    scale = (WIDTH - LEFT - RIGHT) / largest
    top = TOP if several else GAP
    height = top + sum(len(bars) * BAR + GAP for _, bars in groups)
    css = {who: f"c{number}" for number, who in enumerate(whos)}
    colours = {css[who]: COLOURS.get(who, OTHER) for who in whos}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<style>{_style(colours)}</style>",
    ]
    x = 0.0
    for who in whos if several else ():
        parts.append(f'<rect class="{css[who]}" x="{x:.0f}" y="8" width="10" height="10"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="17">{escape(who)}</text>')
        x += 34 + 7.2 * len(who)
    y = float(top)
    for name, bars in groups:
        middle = y + len(bars) * BAR / 2 + 4
        parts.append(f'<text class="name" x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        for who, value in bars:
            parts.append(
                f'<rect class="{css[who]}" x="{LEFT}" y="{y:.0f}" width="{value * scale:.1f}" height="{BAR - 2}"/>'
            )
            at = LEFT + value * scale + 5
            parts.append(f'<text x="{at:.0f}" y="{y + 9.5:.1f}" class="value">{value:,.{digits}f}{escape(unit)}</text>')
            y += BAR
        y += GAP
    if full:
        at = LEFT + full * scale
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 6}" y2="{height - GAP + 4}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


HEIGHT, MARGIN, BELOW = 300, 64, 34


def line_chart(
    title: str, curves: Mapping[str, Sequence[float]], *, log: bool = False, steps: Sequence[str] | None = None
) -> str:
    """Curves over steps, all of one length; the last is drawn on top.

    Args:
        title: what it shows, for those who can't see it.
        curves: name -> values by step.
        log: a logarithmic axis; what isn't positive is left out.
        steps: names of the steps; their numbers where left out.
    """
    drawn = {
        name: [(step, math.log10(v) if log else v) for step, v in enumerate(values, 1) if v > 0 or not log]
        for name, values in curves.items()
    }
    heights = [y for points in drawn.values() for _, y in points]
    last = max(len(values) for values in curves.values())
    every = 1.0 if log else _round(((max(heights) - min(heights)) or 1.0) / 4)
    low = math.floor(min(heights) / every) * every
    high = max(math.ceil(max(heights) / every) * every, low + every)
    x = lambda step: MARGIN + (step - 1) / max(last - 1, 1) * (WIDTH - MARGIN - GAP)  # noqa: E731
    y = lambda value: HEIGHT - BELOW - (value - low) / (high - low) * (HEIGHT - BELOW - TOP)  # noqa: E731
    css = {name: f"c{number}" for number, name in enumerate(curves)}
    rest = itertools.cycle(OTHERS)
    colours = {css[name]: COLOURS.get(name.split(" order")[0]) or next(rest) for name in curves}
    lines = " ".join(f".{name} {{ fill: none; stroke: {pair[0]}; }}" for name, pair in colours.items())
    dark = " ".join(f".{name} {{ stroke: {pair[1]}; }}" for name, pair in colours.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<style>{_style({})} polyline, rect {{ stroke-width: 1.5; }} {lines} "
        f"@media (prefers-color-scheme: dark) {{ {dark} }}</style>",
    ]
    at = float(MARGIN)
    for name in curves:
        parts.append(f'<polyline class="{css[name]}" points="{at:.0f},13 {at + 16:.0f},13"/>')
        parts.append(f'<text x="{at + 21:.0f}" y="17">{escape(name)}</text>')
        at += 34 + 6.6 * len(name)
    for number in range(round((high - low) / every) + 1):
        value = low + number * every
        label = f"1e{value:.0f}" if log else f"{value:g}"
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - GAP}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    marked = (1, *range(_round(last / 6), last + 1, _round(last / 6))) if steps is None else range(1, last + 1)
    for step in marked:
        label = step if steps is None else escape(steps[step - 1])
        anchor = "end" if steps is not None and step == last else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BELOW + 18}" text-anchor="{anchor}">{label}</text>')
    for name, points in drawn.items():
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="{css[name]}" points="{path}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round(rough: float) -> Any:
    """The next of 1, 2, 5, 10, … times a power of ten; an int where it is one."""
    unit = 10.0 ** math.floor(math.log10(rough))
    found = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return int(found) if found >= 1 else found


def _style(colours: dict[str, tuple[str, str]]) -> str:
    light = " ".join(f".{name} {{ fill: {pair[0]}; }}" for name, pair in colours.items())
    dark = " ".join(f".{name} {{ fill: {pair[1]}; }}" for name, pair in colours.items())
    return (
        "text { font: 12px system-ui, sans-serif; fill: #3b4553; } .value { font-size: 10.5px; } "
        f"line {{ stroke: #3b4553; stroke-dasharray: 4 3; }} {light} "
        f"@media (prefers-color-scheme: dark) {{ text {{ fill: #c3ccd8; }} line {{ stroke: #c3ccd8; }} {dark} }}"
    )
