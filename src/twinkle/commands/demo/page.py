"""The demo's outcome as one HTML file: nothing else is loaded, and it can be read on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import twinkle
from twinkle.commands.demo.outcome import Outcome
from twinkle.commands.demo.plot import Series, line_plot
from twinkle.kernel.report_text import NUMBERS, PLAN_COLUMNS, SERVED_COLUMNS, cells, legend, losers, notes, select

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --line: #d9dee6; --paper: #fff; --card: #f6f8fa;
  --original: #7aa5e0; --kernelized: #b4341f; --allowed: #8a93a1; --good: #19733a; --bad: #b4341f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #9aa5b3; --line: #343c48; --paper: #14181e;
  --card: #1c222b; --original: #4f81c4; --kernelized: #ff9a7b; --allowed: #77818f; --good: #5dc584; --bad: #ff9a7b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; }
.dim, figcaption, footer { color: var(--dim); font-size: .9rem; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: 1rem; font-weight: 600; color: var(--paper);
  background: var(--good); }
.verdict.failed { background: var(--bad); }
ul.checks { list-style: none; margin: 0; padding: 0; }
ul.checks li { padding: .5rem .75rem; margin: .4rem 0; border-left: 4px solid var(--good); background: var(--card); }
ul.checks li.failed { border-color: var(--bad); }
ul.checks li { overflow-wrap: anywhere; }
ul.checks b { display: block; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.plots h2 { margin-top: 1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 13px; }
.grid { stroke: var(--line); }
.curve { fill: none; stroke-linejoin: round; stroke-width: 2; }
.curve.original { stroke: var(--original); stroke-width: 7; }
.curve.kernelized { stroke: var(--kernelized); }
.curve.allowed { stroke: var(--allowed); stroke-dasharray: 6 4; }
.key { display: inline-block; margin-right: 1.2rem; }
.key::before { content: ""; display: inline-block; width: 1.6rem; margin-right: .4rem; vertical-align: middle;
  border-top: 2px solid var(--kernelized); }
.key.original::before { border-top: 7px solid var(--original); }
.key.dots::before { width: 8px; height: 8px; border: 0; border-radius: 4px; background: var(--kernelized); }
circle.kernelized { fill: var(--kernelized); }
.key.allowed::before { border-top: 2px dashed var(--allowed); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .92rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { white-space: nowrap; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(outcome: Outcome) -> str:
    """The whole document."""
    checks = outcome.checks()
    failed = sum(not check.passed for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    sections = [
        "<h1>The same training, with and without kernels</h1>",
        f'<p><span class="verdict{" failed" if failed else ""}">{verdict}</span></p>',
        f'<p class="dim">{escape(outcome.setting())}.</p>',
        '<ul class="checks">',
        *(
            f'<li class="{"passed" if check.passed else "failed"}"><b>{"✓" if check.passed else "✗"} '
            f"{escape(check.name)}</b>{escape(check.detail)}</li>"
            for check in checks
        ),
        "</ul>",
        _plots(outcome),
        "<h2>Speed and memory</h2>",
        _table(("", "original", "kernelized"), outcome.figures(), ("original", "kernelized")),
        *(f"<p>{escape(sentence)}</p>" for sentence in outcome.speed()),
        f'<p class="dim">{escape(_how_measured(outcome))}</p>',
        _kernels(outcome),
        _judgement(outcome),
        f"<footer><p>Written by <code>twinkle-kernel demo</code>, version {escape(twinkle.__version__)}.</p></footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>twinkle-kernel demo: {verdict}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _plots(outcome: Outcome) -> str:
    judged = outcome.judged[1:]
    losses = line_plot(
        "Loss by step of both trainings",
        [
            Series("original", "original", outcome.original.losses),
            Series("kernelized", "kernelized", outcome.kernelized.losses),
        ],
    )
    differences = line_plot(
        "Distance of the kernelized loss from the original's, and what rounding may do, by step",
        [
            Series("what rounding may do", "allowed", [judgement.allowed for judgement in judged]),
            Series("kernelized (0 at the foot)", "kernelized", [judgement.distance for judgement in judged], dots=True),
        ],
        first_step=2,
        log=True,
    )
    return (
        f'<div class="plots"><section><h2>Loss, nats a byte</h2>{losses}</section>'
        f"<section><h2>Kernelized minus original</h2>{differences}</section></div>"
    )


def _how_measured(outcome: Outcome) -> str:
    kind = outcome.original.memory["kind"]
    return (
        "Each training has a process of its own and they take turns step by step. Times are medians of the "
        f"{outcome.steps} steps. Memory is the {kind}."
    )


def _kernels(outcome: Outcome) -> str:
    served, planned = outcome.installed, select(outcome.plan)
    rows = [cells(row, PLAN_COLUMNS, planned=True) for row in planned.rows]
    why = [*losers(planned.rows), *((target, "", note) for target, note in notes(planned.rows))]
    return "\n".join(
        [
            "<h2>What was replaced</h2>",
            *(f"<p>{escape(sentence)}</p>" for sentence in outcome.how_served()),
            _table(SERVED_COLUMNS, [cells(row, SERVED_COLUMNS) for row in served], NUMBERS) if served else "",
            "<h2>What the default mapping does on this machine</h2>",
            _table(PLAN_COLUMNS, rows, NUMBERS),
            *(f'<p class="dim">{escape(line)}</p>' for line in (planned.unimplemented, *legend(planned.rows)) if line),
            _details("Why not more", _table(("candidate", "for", "because"), why)) if why else "",
        ]
    )


def _judgement(outcome: Outcome) -> str:
    worst = sorted(outcome.first_step, key=lambda pair: pair[1], reverse=True)[:8]
    tensors = _table(("tensor", "share used"), [(name, f"{used:.0%}") for name, used in worst], ("share used",))
    return f"""<h2>How the numbers are judged</h2>
<p>A kernel may round differently than what it replaces, but it may not be a worse approximation of the maths. Step 1 is
computed in fp64 as well; the kernelized model's distance to that may be twice the original's own, plus one unit in the
last place, for the loss, the logits and every gradient, in the Euclidean and in the maximum norm.</p>
<p>Later steps build on earlier rounding, so there the original is its own measure: it is trained in three summation
orders (channels and rows permuted, the same in exact arithmetic), and the kernelized loss may be as far from their mean
as twice their largest difference so far, plus one unit in the last place. The original's own error in step 1 is taken
from these orders too.</p>
{_details("The tensors of step 1 that use most of the allowed error", tensors)}"""


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table that scrolls sideways on its own; the columns named in ``numbers`` are right-aligned."""

    def line(tag: str, values: Sequence[str]) -> str:
        cells = []
        for name, value in zip(header, values, strict=True):
            css = "number" if name in numbers else "name" if name == "target" else ""  # targets stay on one line
            cells.append(f'<{tag} class="{css}">{escape(value)}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", header)}</thead><tbody>{body}</tbody></table></div>'
