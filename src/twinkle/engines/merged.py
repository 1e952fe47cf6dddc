"""The report on a run of an engine: what its processes left in a folder, by operator and process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinkle.document import GAP, Heading, Part, Points, Table, Text
from twinkle.engines.records import Process, read_all

EXPLANATION = (
    "kernel: calls that the operator's own kernel served; fallbacks: calls that PyTorch's own served, by reason; "
    "compiled: something was compiled in that process, and code made by inductor calls no operator, so that nothing of "
    "it is counted, nor served by the kernel"
)


def merged(folder: Path) -> dict[str, Any]:
    """What the files of a folder say, as plain data.

    Returns:
        ``processes``: every record, with its ``compiled``. ``operators``: by name ``kernel``, ``fallbacks`` (by reason)
        and ``errors`` of all processes together, ``bypassed`` (processes in which something was compiled and the
        operator was never called), and ``processes``: the same numbers of each process that called it, by
        its role and number.
        ``problems``: what can't be read or wasn't activated.
    """
    read, problems = read_all(folder)
    found = dict(zip(_labels(read), read, strict=True))
    names = dict.fromkeys(name for process in read for name in process.record.operators)
    failed = {label: process.record.error for label, process in found.items() if process.record.error}
    problems += [f"{label}: not activated: {error}" for label, error in failed.items()]
    problems += [
        f"{label}: {name} was left out: {why}"
        for label, process in found.items()
        for name, why in process.record.left_out.items()
    ]
    return {
        "processes": [
            {**asdict(process.record), "process": label, "compiled": _is_compiled(process)}
            for label, process in found.items()
        ],
        "operators": {name: _of_operator(name, found) for name in sorted(names)},
        "problems": problems,
    }


def _labels(found: list[Process]) -> list[str]:
    """``VllmWorker-0 4711``: role and number; with host and order, where machines or runs have used a number twice."""
    plain = [f"{process.record.role} {process.record.pid}" for process in found]
    twice = {label for label, times in Counter(plain).items() if times > 1}
    return [
        f"{label} on {process.record.host} ({place})" if label in twice else label
        for place, (label, process) in enumerate(zip(plain, found, strict=True), start=1)
    ]


def _is_compiled(process: Process) -> bool:
    return any(counts.compiled for counts in process.counts.values())


def _of_operator(name: str, found: Mapping[str, Process]) -> dict[str, Any]:
    each = {}
    bypassed = []
    fallbacks: Counter[str] = Counter()
    for label, process in found.items():
        counts = process.counts.get(name)
        if counts is None:
            continue
        if counts.kernel or counts.errors or counts.fallbacks:
            each[label] = {
                "kernel": counts.kernel,
                "fallbacks": counts.fallbacks,
                "errors": counts.errors,
                "compiled": counts.compiled,
            }
            fallbacks.update(counts.fallbacks)
        elif counts.compiled:
            bypassed.append(label)
    return {
        "kernel": sum(of["kernel"] for of in each.values()),
        "fallbacks": dict(fallbacks),
        "errors": sum(of["errors"] for of in each.values()),
        "bypassed": bypassed,
        "processes": each,
    }


def parts(facts: dict[str, Any]) -> Iterator[Part]:
    """The report for people."""
    columns = ("process", "started", "host", "platform", "operators", "compiled")
    rows = [
        (
            process["process"],
            process["started"],
            process["host"],
            process["platform"] or "-",
            str(len(process["operators"])),
            "yes" if process["compiled"] else "no",
        )
        for process in facts["processes"]
    ]
    yield Table(columns, rows, numbers=("operators",))
    counted = [
        (name, process, str(of["kernel"]), str(sum(of["fallbacks"].values())), str(of["errors"]), _note(of))
        for name, found in facts["operators"].items()
        for process, of in [*found["processes"].items(), *[("all", found)] * (len(found["processes"]) > 1)]
    ]
    if counted:
        yield GAP
        columns = ("operator", "process", "kernel", "fallbacks", "errors", "note")
        yield Table(columns, counted, numbers=("kernel", "fallbacks", "errors"), labels=2)
        yield Text(EXPLANATION, "dim")
    silent = [name for name, found in facts["operators"].items() if not found["processes"]]
    bypassed = [(name, ", ".join(found["bypassed"])) for name, found in facts["operators"].items() if found["bypassed"]]
    if bypassed:
        yield GAP
        yield Heading("Bypassed: never called where something was compiled")
        yield Points(bypassed)
    never = [name for name in silent if name not in dict(bypassed)]
    if never:
        yield GAP
        yield Heading("Never called")
        yield Text(", ".join(never))
    if facts["problems"]:
        yield GAP
        yield Heading("Problems")
        yield from (Text(problem, "red") for problem in facts["problems"])


def _note(of: dict[str, Any]) -> str:
    said = [f"{reason} {calls}" for reason, calls in of["fallbacks"].items()]
    return ", ".join([*said, *["compiled"] * bool(of.get("compiled"))]) or "-"
