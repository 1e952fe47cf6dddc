"""The generated part of each op on the pages ``docs/*/ops.md``: what registry, default mapping and result files say.

Markdown, as :mod:`benchmarks.sections` gives it; a function of the result files as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.verdict import Comparison, compare, mean
from twinkle.bench.results import ORIGINAL, Result, ResultFile, medians
from twinkle.bench.view import factor
from twinkle.kernel import registry
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG, default_chain
from twinkle.kernel.report_text import short

SOURCES = "../../src"
RESULTS = "../../benchmarks/results"
EVERY_OP = ("inductor",)
"""Backends that are derived from a reference."""


@dataclass(frozen=True)
class Elsewhere:
    """A backend that another program than ``ops`` measures: the program, its name there, and who is beside it."""

    backend: str
    program: str
    who: str
    other: str = ORIGINAL


ELSEWHERE = {
    "moe_experts": Elsewhere("triton", "moe", "triton, experts alone"),
    "moe_router": Elsewhere("triton", "moe", "triton", "triton, experts alone"),
    "causal_lm_loss": Elsewhere("triton", "loss", "twinkle"),
}


def op(files: dict[str, ResultFile], text: dict[str, str], name: str) -> str:
    """A list: reference, backends, default chain, families and figures of an op.

    Raises:
        KeyError: no such op.
    """
    if name not in registry.ops():
        raise KeyError(name)
    definition = registry.get_op(name)
    lines = {"reference": text["no reference"], "backends": _code([*definition.implementations])}
    if definition.reference:
        path = definition.reference.partition(":")[0].replace(".", "/") + ".py"
        lines["reference"] = f"[`{path.removeprefix('twinkle/kernel/ops/')}`]({SOURCES}/{path})"
        lines["backends"] += f", {_code(EVERY_OP)}"
    targets = [target for target, choice in DEFAULT_KERNEL_CONFIG.items() if choice.op == name]
    lines["chain"] = " → ".join(default_chain(name)) if targets else text["opt-in"]
    lines["targets"] = _targets(targets) or text["no targets"]
    lines["measured"] = "; ".join(_measured(files, text, name)) or text["unmeasured op"]
    return "\n".join(f"- {text[f'op {key}']}{value}" for key, value in lines.items())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _targets(targets: list[str]) -> str:
    """Families of transformers, and keys without a dot."""
    logical = [target for target in targets if "." not in target]
    families = dict.fromkeys(short(target).partition(".")[0] for target in targets if "." in target)
    return ", ".join([*_code(logical).split(", ")] * bool(logical) + sorted(families))


def _measured(files: dict[str, ResultFile], text: dict[str, str], name: str) -> list[str]:
    """For every device: how many times as fast as the original its first measured backend of the chain is."""
    program = ELSEWHERE[name].program if name in ELSEWHERE else "ops"
    found = []
    for file, content in files.items():
        if file.rpartition("/")[2] != program:
            continue
        if name in ELSEWHERE:
            found += [f"{sentence}, {_link(file)}" for sentence in elsewhere(content, text, name)]
            continue
        rows = [row for row in content.results if row.case.split("/")[0] == name and row.chosen]
        who = next((backend for backend in default_chain(name) if any(row.who == backend for row in rows)), "")
        ratio = compare(content.results, name, who, ORIGINAL) if who else None
        if ratio:
            found.append(f"{told(text, content, ratio, who, ORIGINAL)}, {_link(file)}")
    return found


def elsewhere(content: ResultFile, text: dict[str, str], name: str) -> list[str]:
    """A sentence about an op of ``ELSEWHERE`` from a file of its program; none where the file hasn't got both."""
    of = ELSEWHERE[name]
    ratio = _ratio(content.results, of.who, of.other)
    return [told(text, content, ratio, of.who, of.other)] if ratio else []


def told(text: dict[str, str], content: ResultFile, ratio: Comparison, who: str, other: str) -> str:
    """A comparison as a sentence, with the file's device."""
    figures = {key: factor(getattr(ratio, key)) for key in ("mean", "least", "most")}
    return text["faster" if ratio.cases > 1 else "faster once"].format(
        device=content.run["device"], who=who, other=other, cases=ratio.cases, **figures
    )


def _link(file: str) -> str:
    return f"[`{file}.json`]({RESULTS}/{file}.json)"


def _ratio(results: Iterable[Result], who: str, other: str) -> Comparison | None:
    """As :func:`~benchmarks.verdict.compare`, over all cases of a file."""
    pairs = [rows for rows in medians(results).values() if who in rows and other in rows]
    times = [(rows[other].ms, rows[who].ms) for rows in pairs]
    ratios = [theirs["p50"] / ours["p50"] for theirs, ours in times if theirs and ours]
    return Comparison(len(ratios), mean(ratios), min(ratios), max(ratios)) if ratios else None
