"""The committed pages about benchmarks are what the committed results give."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

from benchmarks import plots, render, sections
from benchmarks.step import CANDIDATES
from benchmarks.texts import TEXTS
from tests.support.markdown import links
from tests.support.results import row
from twinkle.bench.results import Result, ResultFile

ROOT = render.ROOT
PAGES = {f"{language}/{name}": ROOT / "docs" / language / name for name in render.PAGES for language in TEXTS}


def test_the_committed_pages_are_what_the_results_give():
    stale = [path for path, text in render.rendered(ROOT).items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python -m benchmarks.render"


def test_every_result_file_is_shown():
    """A figure that was measured and stands on no page is soon forgotten."""
    shown = {part for page in PAGES.values() for part in re.findall(r"<!-- generated: (\w+ \w+) -->", page.read_text())}
    files = render.load(ROOT / "benchmarks" / "results")
    assert {" ".join(reversed(name.split("/"))) for name in files} <= shown


def test_no_plot_is_left_over():
    made = {path for path in render.rendered(ROOT) if path.suffix == ".svg"}
    assert {path for page in PAGES.values() for path in (page.parent / "plots").glob("*")} == made


def test_another_figure_makes_another_page(tmp_path, monkeypatch, capsys):
    for part in ("benchmarks/results", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    assert render.main(["--check"]) == 0
    path = tmp_path / "benchmarks/results/cpu/ops.json"
    content = json.loads(path.read_text())
    first = next(row for row in content["results"] if row["ms"])
    first["ms"]["p50"] = 123456.0
    path.write_text(json.dumps(content))
    assert render.main(["--check"]) == 1
    stale = [f"stale: docs/{language}/{page}.md" for language in TEXTS for page in ("benchmarks", "ops")]
    assert capsys.readouterr().out.splitlines() == stale
    assert render.main([]) == 0
    for language in TEXTS:
        assert "123456" in (tmp_path / "docs" / language / "benchmarks.md").read_text(encoding="utf-8")
    assert render.main(["--check"]) == 0


@pytest.mark.parametrize("name", render.PAGES)
def test_both_languages_have_the_same_parts_and_commands(name):
    english, chinese = ((ROOT / "docs" / language / name).read_text(encoding="utf-8") for language in ("en", "zh"))
    for pattern in (r"<!-- .* -->", r"^#+", r"^(?:python|torchrun|cookbook/) .*$", r"\]\([^)#]*#?", r"`--[\w-]+"):
        found = [re.findall(pattern, page, re.MULTILINE) for page in (english, chinese)]
        assert found[0] == found[1], pattern
    assert re.findall(r"\]\([^)#]*#?", english)


def test_both_languages_have_the_same_words():
    needed = {key for key in TEXTS["en"] if not key.startswith("column")}
    assert needed <= TEXTS["zh"].keys() and TEXTS["en"].keys() <= TEXTS["zh"].keys()


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in links(text):
        assert (page.parent / target.partition("#")[0]).exists(), target
    for program in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{program}.py").exists(), program


def test_a_page_that_asks_for_an_unknown_part_is_an_error():
    with pytest.raises(ValueError, match="no generated part 'opps cuda'"):
        render.filled("<!-- generated: opps cuda -->\n<!-- end -->", {}, "en")


def test_what_was_not_measured_is_said_with_the_command():
    page = render.filled("<!-- generated: step cuda -->\nold\n<!-- end -->\n", {}, "en")
    assert "python -m benchmarks.step --json benchmarks/results/cuda/step.json" in page and "old" not in page


@pytest.mark.parametrize("language", TEXTS)
def test_what_another_program_measured_decides_too(language):
    """Experts and routers are measured as a block."""
    whole = {"hf": 20.0, "triton": 8.0, "triton, experts alone": 10.0}
    rows = tuple(row(who, ms, "moe/block/f") for who, ms in whole.items())
    files = {"cuda/moe": ResultFile(run_of("GPU"), rows)}
    lines = {line.split("`")[1]: line for line in sections.chains(files, TEXTS[language]).splitlines() if "`" in line}
    unmeasured = TEXTS[language]["unmeasured"].format(who="triton")
    assert "2.00x" in lines["moe_experts"] and "1.25x" in lines["moe_router"] and "GPU" in lines["moe_router"]
    assert unmeasured not in lines["moe_experts"] + lines["moe_router"] and unmeasured in lines["swiglu"]


def run_of(device: str) -> dict:
    return {"device": device, "versions": {"torch": "2.11"}, "ceilings": {"copy_gb_per_s": 4000.0}, "id": "x"}


@pytest.mark.parametrize("language", TEXTS)
def test_layouts_become_a_table(language):
    def measured(case: str, who: str, each: float) -> Result:
        figures = {"tokens_per_s_each": each, "tokens_per_s": 2 * each, "experts_ms": 12.5}
        return row(who, 100.0, f"distributed/tiny/{case}", figures=figures)

    rows = (
        measured("1 processes/ep 1", "twinkle", 1000.0),
        measured("2 processes/ep 2", "hf", 300.0),
        measured("2 processes/ep 2", "twinkle", 900.0),
        Result("distributed/tiny/4 processes/ep 4", "hf", "9x9", "-", note="no such machine"),
    )
    run = {**run_of("GPU"), "settings": {"batch": 4, "layers": None}}
    text = sections.section("distributed cuda")({"cuda/distributed": ResultFile(run, rows)}, TEXTS[language])
    assert "| 2 | 2 | hf | 300 | - | 100 |" in text
    assert "| 2 | 2 | twinkle | 900 (3.00x) | 90% | 100 | - | - | 12.5 |" in text
    assert "- tiny/4 processes/ep 4, hf: no such machine" in text and "batch 4" in text and "layers" not in text


@pytest.mark.parametrize("language", TEXTS)
def test_a_step_becomes_a_table_and_two_plots(language):
    figures = {"tokens_per_s": 45000.0, "peak_memory_gb": 32.7, "kernels": 5031.0, "first_step_s": 1.0, "loss": 12.0}
    host = {"p20": 1e5, "p50": 1e5, "p80": 1e5}
    rows = [
        row("hf", 180.0, "step/qwen3-0.6b", host_us=host, figures=figures),
        row("twinkle", 90.0, "step/qwen3-0.6b", host_us=host, figures={**figures, "tokens_per_s": 90000.0}),
        Result("step/qwen3-0.6b", "liger", "9x9", "float32", note="not here"),
    ]
    files = {"cuda/step": ResultFile(run_of("GPU"), tuple(rows))}
    text = sections.section("step cuda")(files, TEXTS[language])
    described = re.findall(r"^- `(.*)`: ", text, re.MULTILINE)
    assert described == ["hf", "twinkle", "liger"], "who has no row isn't explained"
    assert "90,000 (2.00x)" in text and "5031" in text and "- liger: not here" in text
    assert sections.plots(files, TEXTS[language]).keys() == {"step-cuda-speed.svg", "step-cuda-memory.svg"}
    assert all(f"plots/step-cuda-{what}.svg" in text for what in ("speed", "memory"))


@pytest.mark.parametrize("language", TEXTS)
def test_a_model_becomes_a_table_with_what_follows(language):
    def of(who, saved, **figures):
        return {f"{who}_us": saved, f"{who}_low_us": saved - 1, f"{who}_high_us": saved + 1, **figures}

    norm, mlp = "model/transformers.models.llama.modeling_llama.LlamaRMSNorm", "model/a.b.MLP.forward"
    rows = [
        row("hf", 100.0, "model/original"),
        row("hf again", 100.0, "model/original", figures=of("saved", 0.0)),
        row("triton", 99.0, norm, chosen=True, figures=of("saved", 1000.0, calls=4.0)),
        row("liger", 98.0, norm, figures=of("saved", 2000.0, calls=4.0) | of("gain", 1000.0)),
        Result("model/sdpa", "npu", "9x9", "float32", note="wrong: its loss is 1"),
    ]
    files = {"cuda/model": ResultFile({**run_of("GPU"), "settings": {"model": "tiny:llama"}}, tuple(rows))}
    text = sections.section("model cuda")(files, TEXTS[language])
    assert "| `llama.LlamaRMSNorm` | triton ★ | 4 | 1000 (999 .. 1001) | 250 (250 .. 250) | - | " in text
    assert "- `llama.LlamaRMSNorm`: npu → liger → triton → torch" in text
    assert TEXTS[language]["verdict faster"].format(share="2.0%") in text and mlp not in text
    missing = sections.section("model cuda")({}, TEXTS[language])
    assert "twinkle-kernel bench Qwen/Qwen3-0.6B --output benchmarks/results/cuda/model.json" in missing


def test_every_candidate_of_a_step_can_be_explained():
    for text in TEXTS.values():
        assert {key.removeprefix("who ") for key in text if key.startswith("who ")} == CANDIDATES.keys()


def test_the_chains_name_the_figure_that_decided_them():
    rows = [row(who, ms, "swiglu/llama/f") for who, ms in (("hf", 3.0), ("liger", 2.0), ("triton", 1.0))]
    text = sections.chains({"cuda/ops": ResultFile(run_of("GPU"), tuple(rows))}, TEXTS["en"])
    (line,) = [line for line in text.splitlines() if line.startswith("| `swiglu`")]
    assert "npu → triton → liger" in line
    assert "GPU: `triton` 2.00x as fast as `liger` (one case)" in line
    assert "GPU: `liger` 1.50x as fast as `hf`" in line
    assert "`npu`: not measured" in line


def test_a_chart_is_valid_xml_and_its_bars_are_as_long_as_their_values():
    svg = plots.bar_chart("a & b", [("one", [("hf", 50.0), ("triton", 100.0)])], unit=" %", full=100)
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.get("width")) for bar in root.iter(f"{space}rect") if bar.get("height") != "10"]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    (line,) = root.iter(f"{space}line")
    assert float(line.get("x1")) == pytest.approx(plots.LEFT + widths[1], abs=0.2)
    assert root.get("aria-label") == "a & b" and "@media (prefers-color-scheme: dark)" in svg


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_leaves_out_what_was_not_measured(log):
    svg = plots.line_chart("a", {"one": [1.0, math.nan, 3.0], "other": [2.0, 2.0, 2.0]}, log=log)
    curves = [line.get("points") for line in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points.split()) for points in curves[2:]] == [2, 3] and "nan" not in svg


@pytest.mark.parametrize("language", TEXTS)
def test_operators_become_tables_and_a_plot(language):
    text = TEXTS[language]

    def shown(program: str, *rows: Result) -> str:
        files = {f"cuda/{program}": ResultFile(run_of("GPU"), rows)}
        return sections.section(f"{program} cuda")(files, text)

    alone = [
        row(who, ms, "aten/clone/small") for who, ms in (("native", 2.0), ("triton", 1.0), ("triton, direct", 0.5))
    ]
    assert "| `clone/small` | 9x9 | float32 | triton | 2000 | 1000 | 500 | - |" in shown("aten", *alone)
    assert "| PyTorch | 2000 | 2500 | 500 | - |" in shown(
        "aten", *alone, row("native, routed", 2.5, "aten/clone/small")
    )

    swept = [dataclasses.replace(row(who, ms, "sweep/clone/gaps"), shape="64") for who, ms in
             (("native", 1.0), ("installed", 2.0))]  # fmt: skip
    found = shown("sweep", *swept)
    assert text["swept"].format(calls=1, slower=1, allowed="5% + 8 us") in found
    assert "| `clone` gaps | float32 | 64 | 1000 | 2000 |" in found
    charts = sections.plots({"cuda/sweep": ResultFile(run_of("GPU"), tuple(swept))}, text)
    assert "gaps</text>" in charts["sweep-cuda.svg"] and "2^6</text>" in charts["sweep-cuda.svg"]
    larger = [dataclasses.replace(one, case="sweep/clone/cast", shape="128") for one in swept]
    both = sections.plots({"cuda/sweep": ResultFile(run_of("GPU"), (*swept, *larger))}, text)
    curves = [curve.split('"')[0].split() for curve in both["sweep-cuda.svg"].split('points="')[1:]]
    assert [len(curve) for curve in curves] == [2, 2, 1, 1], "two in the legend; each kind in the size that it has"

    whole = [row(who, ms, "aten_model/train") for who, ms in (("native", 2.0), ("all", 2.2))]
    assert "| train 9x9 float32 | all | 2.20 | 1.100 | - |" in shown("aten_model", *whole)
