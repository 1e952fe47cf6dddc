"""Both ways to every operator, each in a fresh process: import, registration, execution by the operator's own kernel.

``python ops/test_packaging.py`` shows the whole matrix on the CPU; ``--imports-only`` its first column, which needs no
device; ``--npu-e2e`` the same on an Ascend NPU, and then all operators at once in a model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle.aten import catalog
from twinkle.aten.harness import framework_level
from twinkle.aten.harness.outcome import Outcome
from twinkle.aten.profiles import Profile, profile
from twinkle.exits import FAILED, FINE, NOTHING_RUN
from twinkle.layout import plain, table, width_of_terminal

MODES = ("package", "script")
STAGES = ("import", "register", "execute")

_MAIN = Path(__file__).with_name("packaging_main.py")


def way_in(operator: str, mode: str, chip: Profile, stages: Sequence[str]) -> dict[str, str]:
    """What became of each stage of one operator in one mode: ``passed``, ``failed``, or ``not reached``."""
    folder = catalog.operator(operator).home.folder
    task: dict[str, Any] = {"operator": operator, "mode": mode, "folder": str(folder), "stages": list(stages)}
    task |= {"dispatch_key": chip.dispatch_key, "platform": chip.platform, "device": chip.device}
    command = [sys.executable, "-P", str(_MAIN), json.dumps(task)]  # its folder's modules have everyday names
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(folder.anchor))
    reached = done.stdout.split()
    found = {stage: "passed" if stage in reached else "not reached" for stage in stages}
    if done.returncode:
        failed = next(stage for stage in stages if stage not in reached)
        found[failed] = f"failed: {done.stderr.strip().splitlines()[-1][:300]}"
    return found


def matrix(
    chip: Profile, stages: Sequence[str], operators: Sequence[str] = ()
) -> dict[tuple[str, str], dict[str, str]]:
    """(operator, mode) -> what became of each stage; of all operators when none is named."""
    ways = [(name, mode) for name in catalog.chosen(operators) for mode in MODES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each only waits for its process
        found = [pool.submit(way_in, name, mode, chip, stages) for name, mode in ways]
    return {way: future.result() for way, future in zip(ways, found, strict=True)}


def together(chip: Profile) -> Outcome:
    """All operators at once in a model on a device."""
    outcome = Outcome("all", "framework", chip.device)
    specs = [catalog.operator(name) for name in catalog.chosen()]
    framework_level.compare(outcome, [spec for spec in specs if spec.by_design is None], chip)
    return outcome


def main(argv: list[str] | None = None) -> int:
    """Runs and prints; the exit code is 1 when a cell isn't passed, 3 when the device isn't there."""
    parser = argparse.ArgumentParser(prog="ops/test_packaging.py", description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--imports-only", action="store_true", help="only import the operators: needs no device")
    choice.add_argument("--npu-e2e", action="store_true", help="on an Ascend NPU, and all operators at once in a model")
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="only these")
    options = parser.parse_args(argv)
    chip = profile("ascend910" if options.npu_e2e else "cpu")
    missing = chip.found.missing()
    if missing is not None:
        print(f"not run: no {chip.platform} on this machine: {missing}")
        return NOTHING_RUN
    stages = STAGES[:1] if options.imports_only else STAGES
    found = matrix(chip, stages, options.operators)
    rows = [(*way, *(row[stage].partition(":")[0] for stage in stages)) for way, row in found.items()]
    print(plain(table(("operator", "mode", *stages), rows, width_of_terminal())))
    cells = [(way, text) for way, row in found.items() for text in row.values()]
    problems = [f"{name} ({mode}): {text}" for (name, mode), text in cells if text != "passed"]
    if options.npu_e2e:
        outcome = together(chip)
        print(f"all at once in a model: {outcome.state}, {outcome.checks} checks")
        problems += outcome.problems
    print("\n".join(problems) or f"{len(cells)} cells, all passed")
    return FAILED if problems else FINE
