"""Line plots as inline SVG: no script, no file, colours by the page's CSS classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40


@dataclass(frozen=True)
class Series:
    """A curve: its name, its CSS class and its values, one for each step; as dots where a line would only zigzag."""

    name: str
    css: str
    values: Sequence[float]
    dots: bool = False


def line_plot(title: str, series: Sequence[Series], *, first_step: int = 1, log: bool = False) -> str:
    """The curves over the steps, with axes and a legend.

    Args:
        title: what the plot shows, for those who can't see it.
        series: drawn in this order, the last on top; all of one length.
        first_step: the step of the first value.
        log: a logarithmic axis; values that are not positive are drawn at its foot.
    """
    values = [value for one in series for value in one.values if math.isfinite(value) and (value > 0 or not log)]
    low, high, ticks = _log_axis(values) if log else _axis(values)
    last_step = first_step + len(series[0].values) - 1

    def y(value: float) -> float:
        if log:
            value = math.log10(max(value, 10.0**low))
        share = (min(max(value, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def x(step: float) -> float:
        return LEFT + (step - first_step) / max(last_step - first_step, 1) * (WIDTH - LEFT - RIGHT)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">']
    for tick in ticks:
        label = f"1e{tick:.0f}" if log else f"{tick:g}"
        at = y(10.0**tick if log else tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for step in _step_ticks(first_step, last_step):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    parts += [_curve(one, first_step, x, y) for one in series]
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key {one.css}{" dots" if one.dots else ""}">{escape(one.name)}</span>' for one in series
    )
    return f"<figure>{''.join(parts)}<figcaption>{legend}</figcaption></figure>"


def _curve(series: Series, first_step: int, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    finite = [(step, value) for step, value in enumerate(series.values, start=first_step) if math.isfinite(value)]
    points = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in finite]
    if series.dots:
        return "".join(f'<circle class="{series.css}" cx="{cx}" cy="{cy}" r="3"/>' for cx, cy in points)
    return f'<polyline class="curve {series.css}" points="{" ".join(map(",".join, points))}"/>'


def _axis(values: list[float]) -> tuple[float, float, list[float]]:
    """Lowest and highest value of the axis, and round ticks between them."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high == low:
        low, high = low - 0.5, high + 0.5
    step = _round_step((high - low) / 4)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return low, high, [low + i * step for i in range(round((high - low) / step) + 1)]


def _round_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)


def _log_axis(values: list[float]) -> tuple[float, float, list[float]]:
    """Exponents of the axis' ends, which are whole, and of its ticks."""
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (-8, -7)
    high = max(high, low + 1)
    every = max(1, round((high - low) / 5))
    return low, high, [float(exponent) for exponent in range(low, high + 1, every)]


def _step_ticks(first: int, last: int) -> list[int]:
    every = max(1, round(_round_step(max(last - first, 1) / 5)))
    inside = [step for step in range(every, last, every) if step - first > every / 2 and last - step > every / 2]
    return list(dict.fromkeys([first, *inside, last]))
