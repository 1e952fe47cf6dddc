"""The demo's outcome as one HTML file, with curves that no other report has."""

from __future__ import annotations

from html import escape

from markupsafe import Markup

import twinkle
from twinkle.commands.demo.outcome import Outcome
from twinkle.commands.demo.plot import Series, line_plot
from twinkle.document import Heading, Part, Table, Text
from twinkle.kernel.report_text import PLAN_COLUMNS, SERVED_COLUMNS, legend, reasons, rows_table, select
from twinkle.page import document, html_of

STYLE = """
:root { --original: #7aa5e0; --kernelized: #b4341f; --allowed: #8a93a1; }
@media (prefers-color-scheme: dark) { :root { --original: #4f81c4; --kernelized: #ff9a7b; --allowed: #77818f; } }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: 1rem; font-weight: 600; color: var(--paper);
  background: var(--good); }
.verdict.failed { background: var(--bad); }
ul.checks { list-style: none; margin: 0; padding: 0; }
ul.checks li { padding: .5rem .75rem; margin: .4rem 0; border-left: 4px solid var(--good); background: var(--card); }
ul.checks li.failed { border-color: var(--bad); }
ul.checks b { display: block; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
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
details { margin: .5rem 0; }
summary { cursor: pointer; }
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
        html_of([Table(("", "original", "kernelized"), outcome.figures(), ("original", "kernelized"))]),
        *(f"<p>{escape(sentence)}</p>" for sentence in outcome.speed()),
        f'<p class="dim">{escape(_how_measured(outcome))}</p>',
        _kernels(outcome),
        _judgement(outcome),
        f"<footer><p>Written by <code>twinkle-kernel demo</code>, version {escape(twinkle.__version__)}.</p></footer>",
    ]
    return document(f"twinkle-kernel demo: {verdict}", Markup("\n".join(sections)), STYLE)


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
    shown: list[Part] = [Heading("What was replaced"), *map(Text, outcome.how_served())]
    shown += [rows_table(served, SERVED_COLUMNS)] if served else []
    shown += [
        Heading("What the default mapping does on this machine"),
        rows_table(planned.rows, PLAN_COLUMNS, planned=True),
        *(Text(line, "dim") for line in (planned.unimplemented, *legend(planned.rows))),
        *reasons(planned.rows),
    ]
    return html_of(shown)


def _judgement(outcome: Outcome) -> str:
    worst = sorted(outcome.first_step, key=lambda pair: pair[1], reverse=True)[:8]
    shares = [(name, f"{used:.0%}") for name, used in worst]
    tensors = html_of([Table(("tensor", "share used"), shares, ("share used",))])
    return f"""<h2>How the numbers are judged</h2>
<p>A kernel may round differently than what it replaces, but it may not be a worse approximation of the maths. Step 1 is
computed in fp64 as well; the kernelized model's distance to that may be twice the original's own, plus one unit in the
last place, for the loss, the logits and every gradient, in the Euclidean and in the maximum norm.</p>
<p>Later steps build on earlier rounding, so there the original is its own measure: it is trained in three summation
orders (channels and rows permuted, the same in exact arithmetic), and the kernelized loss may be as far from their mean
as twice their largest difference so far, plus one unit in the last place. The original's own error in step 1 is taken
from these orders too.</p>
<details><summary>The tensors of step 1 that use most of the allowed error</summary>{tensors}</details>"""
