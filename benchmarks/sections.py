"""The generated parts of the pages about benchmarks, in Markdown: each a function of the result files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from benchmarks import aten_sections, op_sections
from benchmarks.markdown import PLOTS, Files, markdown_table, missing, run_line
from benchmarks.plots import bar_chart, line_chart
from benchmarks.program import figure_cells
from benchmarks.step import CANDIDATES
from benchmarks.training import OURS, judged
from benchmarks.verdict import compare
from twinkle.bench import model_view, view
from twinkle.bench.results import ORIGINAL, Result, ResultFile, medians, percentile_texts, significant, spread
from twinkle.bench.view import Table, factor
from twinkle.bench.worth import ORIGINAL_CASE, conclude
from twinkle.commands.demo.outcome import ULP
from twinkle.kernel import registry
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG, default_chain
from twinkle.kernel.report_text import short

CHOSEN = "★"

# --- sections ---------------------------------------------------------------------------------------------------------


# Each function has a result file, a language's texts and the device's type, and gives what stands below the line that
# names the file's run.


def ops(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A table per op, without the small cases."""
    copy_speed = found.run["ceilings"].get("copy_gb_per_s") if device != "cpu" else None
    parts: list[str] = []
    if device != "cpu":
        parts += [f"![{text[f'plot {d}']}]({PLOTS}/ops-{device}-{d}.svg)" for d in ("fb", "f")]
    for one in view.tables(found.results, copy_speed):
        if one.op:
            parts += [f"#### `{one.op}`", _op_table(one, text)]
    notes = [f"- {who} ({', '.join(ops)}): {why}" for (who, why), ops in view.why_not(found.results).items()]
    return [*parts, *([text["not measured"], "\n".join(notes)] if notes else [])]


def _op_table(found: Table, text: dict[str, str]) -> str:
    rows = []
    for line in found.lines:
        cells = [f"**{cell.text}**" if cell.best and cell.text != "-" else cell.text for cell in line]
        rows.append([cell + f" {CHOSEN}" * line[number].chosen for number, cell in enumerate(cells)])
    header = [text.get(f"column {name}", name) for name in found.columns]
    return markdown_table(header, rows, found.labels)


def host(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """What a call costs on the host: the small cases."""
    return [_op_table(one, text) for one in view.tables(found.results, None) if not one.op]


STEP_PROGRAMS = ("step", "step_fused", "step_moe")
"""Files of the program ``step``, a model each."""

STEP_COLUMNS = ("peak_memory_gb", "gpu_busy_ms", "kernels", "first_step_s", "graphs", "graph_breaks")


def step(found: ResultFile, text: dict[str, str], device: str, program: str = "step") -> list[str]:
    """Who was measured, a line per candidate, and two plots."""
    rows = []
    for (case, shape, dtype), candidates in medians(found.results).items():
        original = candidates.get(ORIGINAL)
        for who, row in _in_order(candidates):
            assert row.ms and row.host_us
            speed = f"{row.figures['tokens_per_s']:,.0f}"
            if original and who != ORIGINAL:
                speed += f" ({factor(row.figures['tokens_per_s'] / original.figures['tokens_per_s'])})"
            figures = figure_cells(row, STEP_COLUMNS)
            model = f"{case.removeprefix('step/')} {shape} {dtype}"
            rows.append((model, who, speed, spread(row.ms, to="–"), significant(row.host_us["p50"] / 1e3), *figures))
    header = [text[f"column {key}"] for key in ("model", "who", "speed", "ms", "host", *STEP_COLUMNS)]
    figures_there = {key for row in found.results for key in row.figures}
    plots = [
        f"![{text[f'plot {what}']}]({PLOTS}/{program}-{device}-{what}.svg)"
        for what, (figure, *_) in STEP_PLOTS.items()
        if figure in figures_there
    ]
    whos = [f"- `{who}`: {text[f'who {who}']}" for who, _ in _in_order({row.who: row for row in found.results})]
    notes = [f"- {row.who}: {row.note}" for row in found.results if row.note]
    return ["\n".join(whos), *plots, markdown_table(header, rows, 2), "\n".join(notes)]


def _in_order(candidates: dict[str, Result]) -> list[tuple[str, Result]]:
    """As the program names them, whatever order they were measured in."""
    return [(who, candidates[who]) for who in CANDIDATES if who in candidates]


def timed(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A line per candidate of ``loss``, ``moe`` and ``attention``: time, memory, and the loss's error."""
    rows = []
    passes = {"f": "f", "fb": "f+b"}
    errors = any("dw_error" in row.figures for row in found.results)
    submitted = any(row.host_us for row in found.results)
    for (_, shape, dtype), candidates in medians(found.results).items():
        for who, row in candidates.items():
            assert row.ms
            peak = row.figures.get("peak_memory_gb")
            cells = [shape, dtype, passes[row.case.rpartition("/")[2]], who, spread(row.ms, to="–")]
            cells += ["-" if row.host_us is None else significant(row.host_us["p50"] / 1e3)] * submitted
            cells += ["-" if peak is None else f"{peak:.2f}"]
            rows.append([*cells, *([f"{row.figures['dw_error']:.2g}"] if errors else [])])
    columns = ["shape", "dtype", "pass", "who", "time", *["host"] * submitted, "peak_memory_gb", *["dw_error"] * errors]
    header = [text.get(f"column {key}", key) for key in columns]
    notes = [f"- {row.who}: {row.note}" for row in found.results if row.note]
    return [markdown_table(header, rows, 4), *notes]


WORK_COLUMNS = ("all_to_all_ms", "sharding_ms", "experts_ms", "rest_ms", "exposed_ms", "peak_memory_gb")


def distributed(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A line per layout and candidate, against the original in the same layout and our own on one device."""
    rows = []
    cases = medians(found.results)
    alone = {
        who: row for candidates in cases.values() for who, row in candidates.items() if "/1 processes/" in row.case
    }
    for (case, _, _), candidates in cases.items():
        for who, row in candidates.items():
            assert row.ms
            each, original = row.figures["tokens_per_s_each"], candidates.get(ORIGINAL)
            share = f"{each / alone[who].figures['tokens_per_s_each']:.0%}" if who in alone else "-"
            speed = f"{each:,.0f}"
            if original and who != ORIGINAL:
                speed += f" ({factor(each / original.figures['tokens_per_s_each'])})"
            figures = figure_cells(row, WORK_COLUMNS)
            _, _, world, ep = case.rsplit("/", 3)
            rows.append((world.split()[0], ep.split()[1], who, speed, share, significant(row.ms["p50"]), *figures))
    columns = ("processes", "ep", "who", "each", "of one", "ms p50", *WORK_COLUMNS)
    header = [text[f"column {key}"] for key in columns]
    notes = [f"- {row.case.removeprefix('distributed/')}, {row.who}: {row.note}" for row in found.results if row.note]
    settings = ", ".join(f"{key} {value}" for key, value in found.run["settings"].items() if value not in ("", None))
    return [settings, markdown_table(header, rows, 3), "\n".join(notes)]


def training(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A line per training, how far the kernelized curve is from the others, and both as plots."""
    rows = []
    for row in found.results:
        assert row.ms
        rows.append((row.who, f"{row.figures['first_loss']:.4f}", f"{row.figures['last_loss']:.4f}", row.dtype))
    header = [text.get(f"column {key}", key) for key in ("who", "first loss", "last loss", "dtype")]
    worst = max(judged(found.curves), key=lambda step: step.used)
    verdict = text["within" if worst.used <= 1 else "not within"].format(
        used=f"{worst.used:.2f}", distance=f"{worst.distance:.2g}", allowed=f"{worst.allowed:.2g}"
    )
    plots = [f"![{text[f'plot {what}']}]({PLOTS}/training-{device}-{what}.svg)" for what in ("loss", "distance")]
    return [markdown_table(header, rows, 1), verdict, *plots, found.results[-1].note]


def kernelize(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A line per case."""
    rows = []
    for row in found.results:
        assert row.ms
        unit, scale = ("us", 1e3) if row.case == "call" else ("ms", 1.0)
        p20, p50, p80 = percentile_texts(row.ms, scale)
        rows.append((row.case, row.who, row.shape, f"{p50} {unit}", f"{p20}–{p80}"))
    header = [text.get(f"column {key}", key) for key in ("case", "who", "shape", "p50", "p20–p80")]
    return [markdown_table(header, rows, 3)]


def model(found: ResultFile, text: dict[str, str], device: str) -> list[str]:
    """A line per entry and backend, and what else its conclusions say."""
    decided, settings = conclude(found.results), found.run["settings"]
    original = next(row for row in found.results if row.case == ORIGINAL_CASE)
    assert original.ms and decided.noise_us is not None
    about = text["original"].format(
        model=settings["model"],
        batch=original.shape,
        dtype=original.dtype,
        ms=significant(original.ms["p50"]),
        rounds=original.samples,
        noise=model_view.microseconds(decided.noise_us),
    )
    here = {verdict: text[f"verdict {verdict}"] for verdict in model_view.HERE}
    rows = []
    for row in found.results:
        if row.case != ORIGINAL_CASE:
            entry, backend, *rest = model_view.cells(row, original, decided, here)
            rows.append((f"`{entry}`", backend.replace("*", f" {CHOSEN}"), *rest))
    header = [text[f"column {key}"] for key in ("entry", "backend", "calls", "a step", "a call", "memory", "here")]
    chains = [f"- `{short(target)}`: {' → '.join(backends)}" for target, (_, backends) in decided.chains.items()] + [
        f"- `{short(target)}`: {text['without']}" for target in decided.without
    ]
    advice = [f"{text['better']}\n\n" + "\n".join(chains)] if chains else []
    return [about, markdown_table(header, rows, 2), *advice]


# --- what decided the order of the default chains ---------------------------------------------------------------------


def ordered_ops() -> dict[str, tuple[str, ...]]:
    """op -> its default chain, of all ops that the default mapping names."""
    return {op: default_chain(op) for op in dict.fromkeys(choice.op for choice in DEFAULT_KERNEL_CONFIG.values())}


def ranked(chain: Sequence[str], op: str, results: Sequence[Result]) -> list[str]:
    """The backends of a chain that were measured, in its order, and after them the original."""
    measured = {row.who for row in results if row.ms and row.case.split("/")[0] == op}
    return [*(who for who in chain if who in measured), *([ORIGINAL] if ORIGINAL in measured else [])]


def chains(files: Files, text: dict[str, str]) -> str:
    """For every op, and every device with results: how much faster each backend is than what comes after it."""
    of_ops = {name: found for name, found in files.items() if name.endswith("/ops")}
    rows = []
    for op, chain in ordered_ops().items():
        decided, measured = [], set()
        for found in of_ops.values():
            order = ranked(chain, op, found.results)
            measured |= set(order)
            for who, other in zip(order, order[1:], strict=False):
                ratio = compare(found.results, op, who, other)
                if ratio:
                    decided.append(op_sections.told(text, found, ratio, who, other))
        of = op_sections.ELSEWHERE.get(op)
        for name, found in files.items():
            if of and name.endswith(f"/{of.program}"):
                decided += op_sections.elsewhere(found, text, op)
                measured.add(of.backend)
        for who in chain:
            if who not in measured:
                known = who in registry.get_op(op).implementations
                decided.append(text["unmeasured" if known else "unregistered"].format(who=who))
        rows.append((f"`{op}`", " → ".join(chain), "<br>".join(decided)))
    return markdown_table((text["column op"], text["column chain"], text["column decided"]), rows, 3)


# --- plots ------------------------------------------------------------------------------------------------------------

STEP_PLOTS = {"speed": ("tokens_per_s", "", 0), "memory": ("peak_memory_gb", " GB", 1)}


def plots(files: Files, text: dict[str, str]) -> dict[str, str]:
    """File name -> SVG."""
    found: dict[str, str] = {}
    for name, content in files.items():
        device, program = name.split("/")
        if program == "ops" and device != "cpu":
            for direction in ("fb", "f"):
                title = text[f"plot {direction}"]
                found[f"ops-{device}-{direction}.svg"] = _memory_plot(content, direction, title)
        if program == "training":
            steps = judged(content.curves)
            # Less than a unit in the last place of 1 is drawn as that: it would only stretch the axis.
            distances = {"allowed": [s.allowed for s in steps], OURS: [max(s.distance, ULP) for s in steps]}
            found[f"training-{device}-loss.svg"] = line_chart(text["plot loss"], content.curves)
            found[f"training-{device}-distance.svg"] = line_chart(text["plot distance"], distances, log=True)
        if program == "sweep":
            found[aten_sections.SWEEP_PLOT.format(device=device)] = aten_sections.sweep_plot(content, text)
        if program in STEP_PROGRAMS:
            for what, (figure, unit, digits) in STEP_PLOTS.items():
                ordered = _in_order({row.who: row for row in content.results if figure in row.figures})
                groups = [(who, [(who, row.figures[figure])]) for who, row in ordered]
                if groups:
                    chart = bar_chart(text[f"plot {what}"], groups, unit=unit, digits=digits)
                    found[f"{program}-{device}-{what}.svg"] = chart
    return found


def _memory_plot(found: ResultFile, direction: str, title: str) -> str:
    """How near each candidate comes to the speed of a copy, for the first variant of each op in the first dtype."""
    copy_speed, groups, first, seen = found.run["ceilings"]["copy_gb_per_s"], [], None, {}
    for (case, shape, dtype), rows in medians(found.results).items():
        op, variant, of = case.split("/")
        first = first or dtype
        small = any(row.host_us for row in rows.values())
        if of != direction or dtype != first or small or seen.setdefault(op, variant) != variant:
            continue
        bars = [
            (who, row.figures["traffic_mb"] / copy_speed / row.ms["p50"] * 100) for who, row in rows.items() if row.ms
        ]
        groups.append((f"{op} {shape}", bars))
    return bar_chart(title, groups, unit=" %", full=100)


Section = Callable[[Files, dict[str, str]], str]

ABOUT: dict[str, Callable[[ResultFile, dict[str, str], str], list[str]]] = {
    "ops": ops,
    "host": host,
    **{program: functools.partial(step, program=program) for program in STEP_PROGRAMS},
    **dict.fromkeys(("loss", "moe", "attention"), timed),
    "distributed": distributed,
    "training": training,
    "kernelize": kernelize,
    "model": model,
}
"""Program -> what is said of its result file."""

INSTEAD = {"host": ("ops",)}
"""Program -> others whose files tell the same, where it has none."""

ABOUT_ATEN = {"aten": aten_sections.aten, "sweep": aten_sections.sweep, "aten_model": aten_sections.aten_model}


def section(name: str) -> Section:
    """``ops cuda`` -> the function that gives it.

    Raises:
        KeyError: there is none of that name.
    """
    kind, _, device = name.partition(" ")
    if kind == "chains":
        return chains
    if kind == "op":
        return lambda files, text: op_sections.op(files, text, device)
    if kind in ABOUT_ATEN:
        return lambda files, text: ABOUT_ATEN[kind](files, text, device)
    about, names = ABOUT[kind], [f"{device}/{program}" for program in (kind, *INSTEAD.get(kind, ()))]

    def of_device(files: Files, text: dict[str, str]) -> str:
        name = next((name for name in names if name in files), None)
        if name is None:
            return missing(names[0], text)
        parts = [run_line(name, files[name], text), *about(files[name], text, device)]
        return "\n\n".join(filter(None, parts))

    return of_device
