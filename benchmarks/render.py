"""Writes the figures of ``benchmarks/results/`` into the documentation: ``python -m benchmarks.render``.

The pages of ``docs/<language>/`` are written by hand, but for what is between ``<!-- generated: NAME -->`` and
``<!-- end -->``; the plots beside them are generated. A test fails when a page isn't what the results give.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.markdown import PLOTS, Files
from benchmarks.sections import plots, section
from benchmarks.texts import TEXTS
from twinkle.bench.results import read

ROOT = Path(__file__).parents[1]
PROGRAMS = (
    *("ops", "host", "step", "step_fused", "step_moe", "loss", "moe", "attention"),
    *("distributed", "training", "kernelize", "model", "aten", "sweep", "aten_model"),
)
PAGES = ("benchmarks.md", "cookbook.md", "ops.md")
GENERATED = re.compile(r"(?P<begin><!-- generated: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def load(results: Path) -> Files:
    """The result files that the pages are made of.

    Raises:
        ValueError: one of them is no result file.
    """
    found = sorted(results.glob("*/*.json"))
    return {f"{path.parent.name}/{path.stem}": read(path) for path in found if path.stem in PROGRAMS}


def filled(page: str, files: Files, language: str) -> str:
    """The page with its generated parts written anew.

    Raises:
        ValueError: the page asks for a part that doesn't exist.
    """

    def generated(match: re.Match[str]) -> str:
        try:
            content = section(match["name"])(files, TEXTS[language])
        except KeyError as error:
            raise ValueError(f"no generated part {match['name']!r}: {error}") from None
        return f"{match['begin']}\n{content}\n\n{match['end']}"

    return GENERATED.sub(generated, page)


def rendered(root: Path) -> dict[Path, str]:
    """Every file that is made from the results, with its content."""
    files = load(root / "benchmarks" / "results")
    found: dict[Path, str] = {}
    for language, text in TEXTS.items():
        folder = root / "docs" / language
        for page in (folder / name for name in PAGES):
            found[page] = filled(page.read_text(encoding="utf-8"), files, language)
        found |= {folder / PLOTS / name: svg for name, svg in plots(files, text).items()}
    return found


def main(argv: list[str] | None = None) -> int:
    """Writes what differs, or with ``--check`` says so; the exit code is 1 then."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description="Figures into the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when something would be written")
    check = parser.parse_args(argv).check
    stale = [
        (path, content)
        for path, content in rendered(ROOT).items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    for path, content in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
