"""Links that lead somewhere, files that can be read, operators that have all their pieces: ``make docs-and-syntax``."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.markdown import ROOT, links
from twinkle.aten import catalog, profiles
from twinkle.aten.harness.cases import cases

FOREIGN = {".git", ".venv", ".venv-vllm", ".venv-docs", "build", "dist", "out", "site", "htmlcov"}
"""Folders at the top that hold what was made or fetched."""


def files(*suffixes: str) -> list[Path]:
    """The repository's files of some kinds, relative to it."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.suffix in suffixes)
    return sorted(
        p for p in found if p.parts[0] not in FOREIGN and not any(part.endswith("_cache") for part in p.parts)
    )


@cache
def anchors(file: Path) -> set[str]:
    """As GitHub names a page's headings: lower case, spaces to hyphens, without punctuation; numbered when repeated."""
    found: dict[str, int] = {}
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[name] = found.get(name, 0) + 1
    numbered = {f"{name}-{i}" for name, n in found.items() for i in range(1, n)}
    return {*found, *numbered, *re.findall(r"(?:id|name)=\"([^\"]+)\"", text)}


def problem(page: Path, link: str) -> str | None:
    """What is wrong with a link of a page; None when nothing is, or it leads out of the repository."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"{link}: no such heading; there are {', '.join(sorted(anchors(target)))}"
    return None


def test_every_link_leads_somewhere() -> None:
    pages = files(".md")
    assert Path("README.md") in pages and Path("templates/operator/README.md") in pages
    found = {str(page): [problem(ROOT / page, link) for link in links((ROOT / page).read_text())] for page in pages}
    assert {page: [p for p in problems if p] for page, problems in found.items() if any(problems)} == {}


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("https://example.org/x", None),
        ("other.md", None),
        ("other.md#two-words-here", None),
        ("#here-1", None),
        ("missing.md", "missing.md: no such file"),
        ("other.md#three", "other.md#three: no such heading; there are two-words-here"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(link: str, wrong: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words: `here`\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[it]({link}) `[no](link)`\n\n## Here\n")
    assert links(page.read_text()) == [link]
    assert problem(page, link) == wrong


@pytest.mark.parametrize("suffix", [".py", ".yaml", ".yml", ".json"])
def test_every_file_can_be_read(suffix: str) -> None:
    read: dict[str, Any] = {".py": ast.parse, ".json": json.loads}
    names = files(suffix)
    assert names
    for name in names:
        try:
            read.get(suffix, yaml.safe_load)((ROOT / name).read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            raise AssertionError(f"{name}: {error}") from error


def test_every_device_profile_is_one() -> None:
    assert {"cpu", "nvidia", "ascend910", "cambricon", "p800-kunlunxin"} <= set(profiles())


@pytest.mark.parametrize("name", catalog.names())
def test_an_operator_has_all_its_pieces(name: str) -> None:
    folder = ROOT / "ops" / name
    pieces = ["README.md", "REPORT.md", "__init__.py", "reference.py", "register.py", "example.py"]
    pieces += ["kernel/torch_level.py", "goldendata/inputs_spec.yaml", "reports/cpu.json"]
    pieces += [f"test/{level}_level.py" for level in ("kernel", "op", "framework")]
    assert [piece for piece in pieces if not (folder / piece).is_file()] == []
    spec = catalog.operator(name)
    triton = folder / "kernel" / "triton_level.py"
    why_not = folder / "kernel" / "README.md"
    assert triton.is_file() if "triton" in spec.kernels else why_not.is_file(), "no Triton level, and no word about why"
    assert next(cases(spec)).name.startswith(f"{name}/")
    assert f"ops/{name}/example.py" in (folder / "README.md").read_text()


def test_a_report_has_what_reports_are_made_of() -> None:
    for file in ROOT.glob("ops/*/reports/*.json"):
        found = json.loads(file.read_text())
        assert found["profile"] == file.stem, file
        for level, outcome in found["levels"].items():
            assert outcome["level"] == level and outcome["operator"] == file.parts[-3], file
            assert {"ok", "state", "checks", "problems", "facts", "not_run", "versions"} <= set(outcome), file
            assert (outcome["ok"] is None) == (outcome["state"] == "not run"), file


@pytest.mark.parametrize(("workflow", "job"), [("gates", "gate"), ("cpu", "tests")])
def test_workflows_run_targets_and_ci_runs_them_too(workflow: str, job: str) -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())
    targets = steps["jobs"][job]["strategy"]["matrix"]["target"]
    needed = {"gate": {"ops-packaging", "packaging", "unit-tests", "docs-and-syntax", "docs"}, "tests": {"test"}}
    assert needed[job] <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    ran = {
        word
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line.startswith("make ")
        for word in line.split()
    }
    if "test" in ran:
        ran |= {"unit-tests", "docs-and-syntax"}  # parts of it, for somebody in a hurry
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE) and target in ran, target


def test_every_issue_form_asks_for_what_the_machine_has() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    for path in forms:
        fields = {field.get("id"): field for field in yaml.safe_load(path.read_text())["body"]}
        assert "twinkle-kernel info --json" in fields["info"]["attributes"]["label"], path
        assert fields["info"]["validations"]["required"] is True, path


def test_every_mechanism_has_a_page_beside_it_whose_files_are_there() -> None:
    """A map of the code that names a file which is gone, or leaves one out, misleads."""
    for folder in ("kernel", "aten", "moe", "loss", "bench", "engines"):
        here = ROOT / "src" / "twinkle" / folder
        text = (here / "README.md").read_text(encoding="utf-8")
        assert "## Non-goals" in text and "## Code" in text, folder
        named = set(re.findall(r"`([\w/]+(?:\.(?:py|json)|/))`", text.partition("## Code")[2]))
        there = {path.name for path in here.glob("*.py")} - {"__init__.py"}
        there |= {f"{path.name}/" for path in here.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
        assert {name for name in named if not (here / name).exists()} == set(), folder
        assert there - named == set(), folder
