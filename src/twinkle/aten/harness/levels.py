"""The levels by name, and what an operator's own files make of them."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from twinkle.aten.errors import RegistrationError
from twinkle.aten.harness import framework_level, kernel_level, op_level
from twinkle.aten.harness.listed import InputsError
from twinkle.aten.harness.outcome import Outcome
from twinkle.aten.harness.time_limit import limited
from twinkle.aten.home import spec_beside
from twinkle.aten.profiles import Profile, profile
from twinkle.exits import FAILED, FINE, NOTHING_RUN
from twinkle.layout import EMPTY_LINE, Block, paragraph, plain, table, width_of_terminal

LEVELS: dict[str, Callable[..., Outcome]] = {
    name: functools.partial(limited, name, module.run)
    for name, module in (("kernel", kernel_level), ("op", op_level), ("framework", framework_level))
}
"""Each is called with an operator and a device profile, and may be given the ``seconds`` that it has."""


def level(name: str, module: str, file: str) -> Callable[[str | Profile], dict[str, Any]]:
    """For ``test/<name>_level.py`` of an operator: its ``run(profile)``.

    Args:
        module, file: that file's ``__name__`` and ``__file__``.
    """

    def run(on: str | Profile) -> dict[str, Any]:
        spec = spec_beside(module, Path(file).resolve().parents[1])
        return LEVELS[name](spec, profile(on) if isinstance(on, str) else on).to_dict()

    if module == "__main__":
        raise SystemExit(_as_program(f"the {name} level", lambda chip: [run(chip)]))
    return run


def example(module: str, file: str) -> Callable[[str | Profile], int]:
    """For an operator's ``example.py``: its ``main(profile)``, which runs and shows all levels."""

    def outcomes(chip: Profile) -> list[dict[str, Any]]:
        spec = spec_beside(module, Path(file).resolve().parent)
        return [run(spec, chip).to_dict() for run in LEVELS.values()]

    def main(on: str | Profile) -> int:
        return show(outcomes(profile(on) if isinstance(on, str) else on))

    if module == "__main__":
        raise SystemExit(_as_program("all levels", outcomes))
    return main


def _as_program(what: str, outcomes: Callable[[Profile], list[dict[str, Any]]]) -> int:
    """A file of an operator run by itself: what can't be used is one line and the exit code 2, as everywhere."""
    parser = argparse.ArgumentParser(description=f"Runs {what} of an operator's checks.")
    parser.add_argument("profiles", nargs="*", default=["cpu"], metavar="PROFILE", help="of a device; default: cpu")
    names = parser.parse_args().profiles
    try:
        chips = [profile(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    try:
        found = [outcome for chip in chips for outcome in outcomes(chip)]
    except (InputsError, RegistrationError) as error:
        parser.error(str(error))
    return show(found)


def show(outcomes: Sequence[dict[str, Any]]) -> int:
    """Prints one table and what went wrong; the exit code is 1 for a failure, 3 when nothing was run."""
    print(plain(as_table(outcomes, width_of_terminal())))
    return exit_code(outcomes)


def as_table(outcomes: Sequence[dict[str, Any]], width: int) -> Iterator[Block]:
    """Outcomes as one table; below it what failed, and why something wasn't run, kernels of what passed included."""
    names = ("operator", "level", "device", "state", "checks")
    rows = [tuple(str(found[name]) for name in names) for found in outcomes]
    yield from table(names, rows, width, numbers=("checks",))
    notes = [f"{found['operator']}: {problem}" for found in outcomes for problem in _by_kind(found["problems"])]
    notes += dict.fromkeys(found["not_run"] for found in outcomes if found["not_run"])
    notes += _kernels_not_run(outcomes)
    if notes:
        yield EMPTY_LINE
        yield from (Block(paragraph(note, width, indent=2)) for note in notes)


def _kernels_not_run(outcomes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """By language and reason, the operators whose kernel in it nobody has run here, whatever the others did."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for outcome in outcomes:
        for kernel, fact in outcome["facts"].items():
            if isinstance(fact, str) and fact.startswith("not run: "):
                language, _, part = kernel.partition(" of ")
                found.setdefault((language, fact), {})[part or outcome["operator"]] = None
    for (language, fact), operators in found.items():
        yield f"{language} kernel of {', '.join(operators)}: {fact}"


_CALL = re.compile(r"[\w.]+/[^/:]+/\w+/\d+(, [\w ]+)?|(?<![\w.:])\d[\d.e+-]*")
"""What differs in problems of one kind: the call as checks name it, from the operator to the context, and numbers."""


def _by_kind(problems: Sequence[str]) -> Iterator[str]:
    """The first problem of each kind, and how many other calls have it: one mistake shows in all calls, mostly."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(_CALL.sub("", problem), []).append(problem)
    for found in kinds.values():
        others = len(set(found)) - 1
        yield found[0] if not others else f"{found[0]} (and of {others} other calls)"


def exit_code(outcomes: Sequence[dict[str, Any]]) -> int:
    """1 when a check failed, 3 when nothing could be run, else 0."""
    states = {outcome["state"] for outcome in outcomes}
    return FAILED if "failed" in states else FINE if "passed" in states else NOTHING_RUN
