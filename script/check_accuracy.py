"""Runs kernels beside their golden data: ``python script/check_accuracy.py [OPERATOR ...] --device PROFILE``.

The data are made before, here or elsewhere, by ``script/gen_golden.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from twinkle.aten import RegistrationError, catalog, profile
from twinkle.aten.harness.golden import DATA, GoldenError, check
from twinkle.aten.harness.levels import show
from twinkle.aten.harness.listed import InputsError


def main(argv: list[str] | None = None) -> int:
    """Runs and prints.

    Returns:
        0 when all kernels are right, 1 when one isn't, 2 when data are missing or not what the index says, 3 when the
        device isn't there.
    """
    parser = argparse.ArgumentParser(prog="script/check_accuracy.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument("--device", default="cpu", metavar="PROFILE", help="a device profile; default: cpu")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help=f"default: {DATA}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found there")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    try:
        chip = profile(options.device)
        specs = [catalog.operator(name) for name in catalog.chosen(options.operators)]
    except (ValueError, RegistrationError) as error:
        parser.error(str(error))
    outcomes: list[dict[str, Any]] = []
    errors = []
    for spec in specs:
        try:
            outcomes.append(check(spec, chip, options.data).to_dict())
        except (GoldenError, InputsError) as error:
            errors.append(str(error))
    code = show(outcomes)
    if options.json:
        text = json.dumps({"device": chip.name, "outcomes": outcomes, "errors": errors}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 2 if errors else code


if __name__ == "__main__":
    raise SystemExit(main())
