"""Makes the golden data of ATen operators on the CPU: ``python script/gen_golden.py [OPERATOR ...]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twinkle.aten import RegistrationError, catalog
from twinkle.aten.harness.golden import DATA, GoldenError, generate, parts
from twinkle.aten.harness.listed import InputsError


def main(argv: list[str] | None = None) -> int:
    """Runs and prints; the exit code is 1 when something can't be made, or is not what an operator's index says."""
    parser = argparse.ArgumentParser(prog="script/gen_golden.py", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help=f"default: {DATA}")
    parser.add_argument("--write-index", action="store_true", help="the digests of what was made become the index")
    options = parser.parse_args(argv)
    try:
        specs = [part for name in catalog.chosen(options.operators) for part in parts(catalog.operator(name))]
    except RegistrationError as error:
        parser.error(str(error))
    code = 0
    for spec in specs:
        try:
            files = generate(spec, options.data, write_index=options.write_index)
            print(f"{spec.name}: {files} files in {options.data / spec.name}")
        except (GoldenError, InputsError, OSError) as error:
            print(error, file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
