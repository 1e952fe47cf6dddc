"""Pages: what a command writes with --html, and how each part of a report looks there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from tests.support.pages import Reader, read_alone
from twinkle import presets
from twinkle.bench import model_view, worth
from twinkle.bench.results import ORIGINAL, Result
from twinkle.cli import app
from twinkle.commands import verify
from twinkle.commands.models import ModelSource
from twinkle.document import GAP, Bar, BarChart, Code, Heading, Part, Points, Table, Text
from twinkle.kernel import DEFAULT_KERNEL_CONFIG
from twinkle.page import html_of, page

COMMANDS = {
    "plan": ["plan", "tiny:qwen3_moe"],
    "plan for another device": ["plan", "tiny:qwen3_vl", "--device", "npu", "--all"],
    "verify": ["verify", "tiny:qwen3", "--layers", "1", "--device", "cpu"],
    "bench of a model": ["bench", "tiny:llama", "--device", "cpu", "--batch", "2", "--length", "16", "--budget", "1"],
    "bench of ops": ["bench", "--quick", "--device", "cpu", "--op", "rotary"],
}


def run(*arguments: str) -> Any:
    """A command on a terminal so wide that every paragraph and every row is one line."""
    return CliRunner(env={"COLUMNS": "3000"}).invoke(app, arguments)


def read(*parts: Part) -> Reader:
    return read_alone(page("A title", parts))


# --- what commands write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", COMMANDS)
def test_the_page_says_what_the_terminal_says(case: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = run(*COMMANDS[case], "--html", str(file))
    assert result.exit_code == 0, result.output
    *said, last = [line for line in (" ".join(line.split()) for line in result.stdout.splitlines()) if line.strip("─-")]
    assert last == f"written: {file}" and len(said) > 8
    reader = read_alone(file.read_text(encoding="utf-8"))
    shown = reader.lines()
    assert [line for line in said if line not in shown] == []
    assert re.search(r"^Written on 20\d\d-.* by twinkle-kernel .*; Python 3\..*, torch .*, transformers ", shown[-1])
    assert bool(reader.of("svg")) == (case in ("verify", "bench of a model"))


def test_beside_json_the_page_is_written_in_silence(tmp_path: Path) -> None:
    for arguments in (COMMANDS["plan"], COMMANDS["bench of ops"]):
        file = tmp_path / "page.html"
        result = run(*arguments, "--json", "--html", str(file))
        assert json.loads(result.stdout) and not result.stderr
        read_alone(file.read_text(encoding="utf-8"))
        file.unlink()


def test_the_name_of_a_model_is_no_markup(tmp_path: Path) -> None:
    folder, file = tmp_path / "<script>alert(1)<" / "script><b title='\"&amp;", tmp_path / "page.html"
    presets.preset_config("qwen3").save_pretrained(folder)
    assert run("plan", str(folder), "--html", str(file)).exit_code == 0
    reader = read_alone(file.read_text(encoding="utf-8"))
    assert sum(f"{folder}" in line for line in reader.lines()) == 3, "the tab, the heading and the first line"


@pytest.mark.parametrize("command", ["plan", "verify", "bench of a model", "bench of ops"])
def test_a_page_that_can_not_be_written_is_told_before_anything_is_done(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any, **named: Any) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(ModelSource, "on_meta", never)
    monkeypatch.setattr(ModelSource, "with_random_weights", never)
    monkeypatch.setattr("twinkle.commands.bench._measure", never)
    result = run(*COMMANDS[command], "--html", str(tmp_path / "new" / "page.html"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--html {tmp_path}/new/page.html: there is no folder {tmp_path}/new; make it first" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    ("command", "option"), [("plan", "--html"), ("bench of ops", "--html"), ("bench of ops", "--output")]
)
def test_a_disk_that_is_full_in_the_end_loses_nothing(command: str, option: str) -> None:
    """It was writable when the command began. What was found is printed, and the rest is one line."""
    result = run(*COMMANDS[command], option, "/dev/full")
    assert result.exit_code == 2 and "rotary" in result.stdout and "written" not in result.stdout
    reason = f"{option} /dev/full: No space left on device; it isn't whole, but what was found is above"
    assert result.stderr == f"twinkle-kernel: {reason}\n"


def test_two_options_can_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "both"
    file.write_text("what was there")
    result = run(*COMMANDS["bench of ops"], "--output", str(file), "--html", str(tmp_path / "." / "both"))
    assert result.exit_code == 2
    assert f"--html {file}: --output writes there too; name another file" in result.stderr
    assert file.read_text() == "what was there"


# --- what is in them --------------------------------------------------------------------------------------------------


def _row(who: str, case: str, figures: dict[str, float], **fields: Any) -> Result:
    return Result(case, who, "8x256", "float32", {"p20": 9.0, "p50": 10.0, "p80": 11.0}, figures=figures, **fields)


def _about(saved: float, memory: float | None = None) -> dict[str, float]:
    figures = {"calls": 9.0, "saved_us": saved, "saved_low_us": saved - 10, "saved_high_us": saved + 10}
    return figures if memory is None else figures | {"step_memory_gb": memory}


NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
CASE = f"{worth.CASE}{NORM}"
RESULTS = [
    _row(ORIGINAL, worth.ORIGINAL_CASE, {"step_memory_gb": 0.02}),
    _row(worth.AGAIN, worth.ORIGINAL_CASE, _about(0) | {"saved_low_us": -50.0, "saved_high_us": 40.0}),
    _row("triton", CASE, _about(-200, 0.021), chosen=True),
    _row("liger", CASE, _about(800) | {"gain_us": 1000.0, "gain_low_us": 990.0, "gain_high_us": 1010.0}),
    _row("torch", CASE, _about(20, 0.01)),
]


def _bars(reader: Reader) -> list[tuple[str, dict[str | None, dict[str, str | None]]]]:
    """The style of each bar, and the shapes of its drawing by their class."""
    bars: list[tuple[str, dict[str | None, dict[str, str | None]]]] = []
    for tag, attributes in reader.tags:
        css = attributes.get("class") or ""
        if tag == "div" and css.startswith("bar "):
            bars.append((css.removeprefix("bar "), {}))
        elif tag in ("rect", "line"):
            bars[-1][1][css] = attributes
    return bars


def test_a_bench_shows_gains_losses_and_noise_and_a_mapping_to_copy() -> None:
    reader = read(*model_view.parts(RESULTS, worth.conclude(RESULTS)))
    lines = reader.lines()
    for said in ("triton* -200 us, slower", "liger 800 us, faster", "torch 20.0 us, within the noise"):
        assert f"qwen3.Qwen3RMSNorm, {said}" in lines
    assert "qwen3.Qwen3RMSNorm, triton* +1.00 MB" in lines and "qwen3.Qwen3RMSNorm, torch -10.0 MB" in lines
    slower, faster, within, *memory = _bars(reader)
    assert [style for style, _ in (slower, faster, within, *memory)] == ["red", "", "dim", "red", ""]
    # From -210 to 810 us, in percent of the width; the noise is 50 us.
    assert _extent(slower) == ("0.98%", "19.61%") and _extent(faster) == ("20.59%", "78.43%")
    for _, shapes in (slower, faster, within):
        assert (shapes["band"]["x"], shapes["band"]["width"]) == ("15.69%", "9.8%")
        assert shapes["zero"]["x1"] == "20.59%"
    assert (faster[1]["spread"]["x1"], faster[1]["spread"]["x2"]) == ("98.04%", "100.0%")
    code = reader.text[reader.text.index("from twinkle.kernel import") :].partition("\nWritten on")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    changed = [target for target, choice in names["mapping"].items() if choice != DEFAULT_KERNEL_CONFIG[target]]
    assert changed == [NORM] and names["mapping"].keys() == DEFAULT_KERNEL_CONFIG.keys()


def test_a_chart_says_of_what_was_not_called_what_the_table_says() -> None:
    results = [*RESULTS[:2], _row("torch", CASE, _about(-30) | {"calls": 0.0, "calls_left": 9.0})]
    reader = read(*model_view.parts(results, worth.conclude(results)))
    assert "qwen3.Qwen3RMSNorm, torch -30.0 us, not called" in reader.lines()
    assert [style for style, _ in _bars(reader)] == ["yellow"]


def _extent(bar: tuple[str, dict[str | None, dict[str, str | None]]]) -> tuple[str | None, str | None]:
    return bar[1]["value"]["x"], bar[1]["value"]["width"]


def test_a_verdict_is_a_word_and_a_colour() -> None:
    outcomes = [
        verify.Outcome("a.norm", verify.OK, ["torch"], 1, 3, "weight", 0.4),
        verify.Outcome("a.mlp", verify.OFF, ["torch"], 1, 3, "weight", float("inf"), "it raised"),
        verify.Outcome("a.rope", verify.NOT_CALLED, ["torch"], 1, 0, "weight", 0.5),
        verify.Outcome(verify.ALL, verify.NOT_INSTALLED, []),
    ]
    reader = read(*verify.parts(outcomes))
    _, *rows = reader.of("tr")
    assert [row["class"] for row in rows] == ["", "red", "yellow", "dim"]
    words = [cell for cell in reader.of("td") if "word" in (cell["class"] or "").split()]
    assert [cell["data-name"] for cell in words] == ["verdict"] * 4
    for line in ("a.norm torch 1 3 weight 40% ok", "all together - - - - - not installed", "a.mlp inf%, off"):
        assert line in reader.lines()
    bars = _bars(reader)
    assert [_extent(bar)[1] for bar in bars] == ["20.0%", "100.0%", "25.0%"], "up to twice what is allowed"
    assert [shapes["limit"]["x1"] for _, shapes in bars] == ["50.0%"] * 3


HOSTILE = "</style></pre>\"'><script>alert(1)</script>&amp;<img src=x onerror=alert(1)>"
PARTS: Sequence[Part] = (
    GAP,
    Heading(HOSTILE),
    Text(HOSTILE, HOSTILE),
    Points([(HOSTILE, HOSTILE)]),
    Table((HOSTILE, "b"), [(HOSTILE, HOSTILE)], (HOSTILE,), (HOSTILE,), word=HOSTILE),
    Code(lambda width: [HOSTILE]),
    BarChart(HOSTILE, [Bar(HOSTILE, 1.0, HOSTILE, 0.5, 2.0, HOSTILE)], HOSTILE, 0.3, 1.0),
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_no_text_of_a_part_is_markup(part: Part) -> None:
    reader = read_alone(page(HOSTILE, [part], HOSTILE))
    plain = " ".join(HOSTILE.split())
    texts = {Heading: 1, Text: 1, Points: 2, Table: 3, Code: 1, BarChart: 4}.get(type(part), 0)
    assert " ".join(reader.lines()).count(plain) == 3 + texts, "the tab, the heading, the foot, and the part's own"


def test_a_cell_knows_its_column_for_where_there_is_no_room_for_a_header() -> None:
    reader = read(Table(("", "b", "c"), [("x", "y", "-"), ("z", "-", "1")], ("c",), labels=2))
    cells = [(cell["data-name"], " ".join((cell["class"] or "").split())) for cell in reader.of("td")]
    assert cells == [
        ("", "label"),
        ("b", "label"),
        ("c", "number none"),
        ("", "label"),
        ("b", "label none"),
        ("c", "number"),
    ]
    source = page("A title", [])
    assert "@media (max-width: 40rem)" in source and "content: attr(data-name)" in source
    assert "prefers-color-scheme: dark" in source


def test_a_chart_of_nothing_but_zeros_can_be_drawn() -> None:
    source = html_of([BarChart("Nothing", [Bar("a", 0.0, "0")])])
    assert 'class="value" x="0.0%" width="0.0%"' in source
