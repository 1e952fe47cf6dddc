"""What the generated parts of the pages share: tables, which run a figure is from, what to do where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinkle.bench.results import ResultFile

Files = dict[str, ResultFile]
"""``device type/program`` -> what ``benchmarks/results/`` holds under that name."""

RESULTS = "../../benchmarks/results"
PLOTS = "plots"
MODEL = "Qwen/Qwen3-0.6B"
"""Of which the pages show what each entry is worth."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], labels: int) -> str:
    """A table whose columns after the first ``labels`` hold numbers."""
    rule = ["---" if number < labels else "---:" for number in range(len(header))]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (header, rule, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def missing(name: str, text: dict[str, str]) -> str:
    _, program = name.split("/")
    command = f"python -m benchmarks.{program} --json benchmarks/results/{name}.json"
    if program == "model":
        command = f"twinkle-kernel bench {MODEL} --output benchmarks/results/{name}.json"
    return text["missing"].format(command=command)


def run_line(name: str, found: ResultFile, text: dict[str, str]) -> str:
    run = found.run
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items() if version)
    ceilings = ", ".join(f"{key} {value:g}" for key, value in run["ceilings"].items())
    best = text["ceilings"].format(ceilings=ceilings) if ceilings else ""
    place = f"[`{name}.json`]({RESULTS}/{name}.json)"
    return text["run"].format(device=run["device"], versions=versions, best=best, place=place, id=run["id"])
