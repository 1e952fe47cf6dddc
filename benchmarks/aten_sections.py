"""The generated parts of the pages about ATen operators: alone, swept over sizes, and in a whole model."""

from __future__ import annotations

import statistics

from benchmarks.markdown import PLOTS, Files, markdown_table, missing, run_line
from benchmarks.plots import line_chart
from twinkle.bench.aten import DIRECT, FLOOR, NATIVE, PEER, ROUTED
from twinkle.bench.results import Result, ResultFile, medians, significant
from twinkle.bench.routes import ALLOWED, ALLOWED_US, points

SWEEP_PLOT = "sweep-{device}.svg"


def aten(files: Files, text: dict[str, str], device: str) -> str:
    """A line per timed call: PyTorch's own kernel, who serves where the operator is installed, ours, FlagGems."""
    name = f"{device}/aten"
    if name not in files:
        return missing(name, text)
    rows = []
    for (case, shape, dtype), whos in medians(files[name].results).items():
        if NATIVE not in whos:
            continue
        others = (NATIVE, ROUTED, FLOOR, PEER)
        ours = next((row for who, row in whos.items() if who not in others and not who.endswith(DIRECT)), None)
        direct = next((row for who, row in whos.items() if who.endswith(DIRECT)), None)
        cells = (whos[NATIVE], whos.get(ROUTED, ours), direct, whos.get(PEER))
        served = text["native"] if ROUTED in whos or ours is None else ours.who
        rows.append((f"`{case.removeprefix('aten/')}`", shape, dtype, served, *map(_times, cells)))
    header = [
        text[f"column {key}"] for key in ("call", "shape", "dtype", "serves", NATIVE, "installed", "direct", PEER)
    ]
    return "\n\n".join([run_line(name, files[name], text), markdown_table(header, rows, 4)])


def _times(row: Result | None) -> str:
    """Microseconds of the device, and of the host where they are told."""
    if row is None or row.ms is None:
        return "-"
    host = f" / {significant(row.host_us['p50'])}" if row.host_us else ""
    return significant(row.ms["p50"] * 1e3) + host


def sweep(files: Files, text: dict[str, str], device: str) -> str:
    """How many calls take longer than they may, the worst of them, and a plot."""
    name = f"{device}/sweep"
    if name not in files:
        return missing(name, text)
    found = points(files[name].results)
    slower = sorted((point for point in found if point.slower), key=lambda point: point.native_us - point.installed_us)
    allowed = f"{ALLOWED - 1:.0%} + {ALLOWED_US:g} us"
    said = text["swept"].format(calls=len(found), slower=len(slower), allowed=allowed)
    header = [text[f"column {key}"] for key in ("call", "dtype", "bytes", NATIVE, "installed")]
    rows = [
        (f"`{p.operator}` {p.kind}", p.dtype, str(p.size), significant(p.native_us), significant(p.installed_us))
        for p in slower[:10]
    ]
    picture = f"![{text['plot sweep']}]({PLOTS}/{SWEEP_PLOT.format(device=device)})"
    return "\n\n".join(
        [run_line(name, files[name], text), said, picture, *([markdown_table(header, rows, 2)] if rows else [])]
    )


def sweep_plot(found: ResultFile, text: dict[str, str]) -> str:
    """How many times as fast as PyTorch's own kernel installed operators are, by size, a curve per kind of copy."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for point in points(found.results):
        ratios.setdefault(point.kind, {}).setdefault(point.size, []).append(point.native_us / point.installed_us)
    sizes = sorted({size for by_size in ratios.values() for size in by_size})
    curves = {
        kind: [statistics.median(by_size.get(size, [1.0])) for size in sizes]
        for kind, by_size in sorted(ratios.items())
    }
    return line_chart(text["plot sweep"], curves, steps=[f"2^{size.bit_length() - 1}" for size in sizes])


def aten_model(files: Files, text: dict[str, str], device: str) -> str:
    """A line for each set of installed operators: a training step and a generation."""
    name = f"{device}/aten_model"
    if name not in files:
        return missing(name, text)
    rows = []
    for (case, shape, dtype), whos in medians(files[name].results).items():
        for who, row in whos.items():
            assert row.ms and whos[NATIVE].ms
            part = f"{row.ms['p50'] / whos[NATIVE].ms['p50']:.3f}"
            rows.append(
                (f"{case.split('/')[1]} {shape} {dtype}", who, significant(row.ms["p50"]), part, row.note or "-")
            )
    header = [text[f"column {key}"] for key in ("what", "installed there", "ms p50", "of native", "served")]
    return "\n\n".join([run_line(name, files[name], text), markdown_table(header, rows, 2)])
