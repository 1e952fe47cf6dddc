"""``twinkle-kernel ops new`` in somebody else's project: what a package is imported as, and where it is listed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.aten.conftest import DEVICE, INTERPRETED, ROOT
from twinkle.aten import RegistrationError, catalog, scaffold
from twinkle.cli import app

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="files are the same on every device")


def new(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "new", *arguments])


HEAD = '[project]\nname = "chip"\n'
SECTION = '[project.entry-points."twinkle.aten_ops"]\n'
MISH = 'mish = "chip_ops.mish.register:SPEC"'


CHANGED = {
    "between others": ("{add}{tanh}\n[tool]\nx = 1\n", "{add}{mish}{tanh}\n[tool]\nx = 1\n"),
    "no blank line ends the section": ("# ours\n{tanh}[tool.b]\na = 1\n", "{mish}# ours\n{tanh}[tool.b]\na = 1\n"),
    "a blank line within it": ('{add}\n"b" = "x"\n', '{add}\n"b" = "x"\n{mish}'),
    "it is empty": ("[tool]\nx = 1", "{mish}[tool]\nx = 1\n"),
    "it ends the file": ("{add}# no line end", "{add}{mish}# no line end\n"),
}
"""What comes after the section's head, before and after."""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("case", CHANGED)
def test_a_project_lists_it_and_is_the_same_otherwise(case: str, end: str, tmp_path: Path) -> None:
    lines = {"add": 'add = "x"\n', "tanh": 'tanh = "x"\n', "mish": f"{MISH}\n"}
    before, after = (f"{HEAD}{SECTION}{text.format_map(lines)}".replace("\n", end) for text in CHANGED[case])
    assert _listed(before, tmp_path) == after


def test_a_project_without_the_section_gets_it(tmp_path: Path) -> None:
    assert _listed(f"{HEAD}[tool]\nx = 1", tmp_path) == f"{HEAD}[tool]\nx = 1\n\n{SECTION}{MISH}\n"


def _listed(text: str, folder: Path) -> str:
    project = folder / "pyproject.toml"
    project.write_bytes(text.encode())
    added = [scaffold.add_entry_point("mish", "chip_ops.mish.register:SPEC", project) for _ in range(2)]
    assert added == [True, False], "once"
    return project.read_bytes().decode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'{HEAD}x = """\n{SECTION}"""\n', "in a form that isn't edited"),
        (f'{HEAD}entry-points = {{"twinkle.aten_ops" = {{add = "x"}}}}\n', "in a form that isn't edited"),
        (f'{HEAD}[project.entry-points]\n"twinkle.aten_ops" = {{}}\n', "in a form that isn't edited"),
        (f'{HEAD}{SECTION}mish = "elsewhere:SPEC"\n', "it says that mish is 'elsewhere:SPEC'"),
        ('[tool.poetry]\nname = "chip"\n', "it describes no project in the form of .project."),
        ("[project\n", "it can't be read: "),
    ],
)
def test_a_project_that_is_not_edited_is_left_as_it_is(text: str, why: str, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(text)
    with pytest.raises(RegistrationError, match=why) as error:
        scaffold.add_entry_point("mish", "chip_ops.mish.register:SPEC", project)
    assert str(error.value).endswith(f"(write it yourself, in the section {SECTION.strip()}: {MISH})")
    assert project.read_text() == text


@pytest.mark.parametrize(
    ("folder", "around", "package", "project"),
    [
        ("chip_ops", [], "chip_ops", "pyproject.toml"),
        ("src/chip_ops", [], "chip_ops", "pyproject.toml"),
        ("src/chip/ops", ["src/chip"], "chip.ops", "pyproject.toml"),
        ("python/chip", [], "chip", "python/pyproject.toml"),
    ],
)
def test_what_it_is_imported_as_comes_from_its_folder(
    folder: str, around: list[str], package: str, project: str, tmp_path: Path
) -> None:
    for each in (*around, folder):
        (tmp_path / each).mkdir(parents=True, exist_ok=True)
    for each in around:
        (tmp_path / each / "__init__.py").touch()
    place = scaffold.Place.of(tmp_path / folder)
    assert (place.package, place.project) == (package, tmp_path / project)
    assert place.value("mish") == f"{package}.mish.register:SPEC"


@pytest.mark.multiprocess
def test_a_package_of_somebody_elses_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made, listed where nothing of ours was listed before, and imported by what it is listed as."""
    (tmp_path / "src" / "chip_ops").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(HEAD)
    made = new("mish", "--folder", str(tmp_path / "src" / "chip_ops"))
    assert made.exit_code == 0 and "pyproject.toml lists it now (mish = " in made.stdout, made.output
    listed = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"][catalog.GROUP]
    assert listed == {"mish": "chip_ops.mish.register:SPEC"}
    assert "`python src/chip_ops/mish/example.py cpu`" in (tmp_path / "src/chip_ops/mish/README.md").read_text()
    code = "import chip_ops.mish as m; r = m.register_a1(platform='cpu'); print(m.SPEC.home.package, r.keys)"
    path = os.pathsep.join([str(tmp_path / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout == "chip_ops.mish ('CPU',)\n", done.stderr
    again = new("mish", "--folder", str(tmp_path / "src" / "chip_ops"))
    assert again.exit_code == 2 and "mish is there already" in again.stderr


def test_what_was_done_is_what_is_said(tmp_path: Path) -> None:
    """Without a project, in one that can't be edited, and beside another package of the folder's name."""
    (tmp_path / "ops").mkdir()
    made = new("mish", "--folder", str(tmp_path / "ops")).stdout
    assert f"There is no {tmp_path / 'pyproject.toml'}. The one of the package that will hold it needs:" in made
    assert '    [project.entry-points."twinkle.aten_ops"]\n    mish = "ops.mish.register:SPEC"\n' in made
    assert f"ops is found in {ROOT / 'ops'} first, and ops.mish with it" in made and "lists it" not in made
    (tmp_path / "pyproject.toml").write_text("[tool.poetry]\n")
    made = new("tanh", "--folder", str(tmp_path / "ops")).stdout
    assert f"{tmp_path / 'pyproject.toml'} was not changed: it describes no project in the form of [project]" in made


def test_a_folder_that_python_cannot_import_from(tmp_path: Path) -> None:
    (tmp_path / "chip-ops").mkdir()
    made = new("mish", "--folder", str(tmp_path / "chip-ops"))
    assert made.exit_code == 2 and "'chip-ops' is no name that a package can have in Python" in made.stderr
    assert list((tmp_path / "chip-ops").iterdir()) == []
