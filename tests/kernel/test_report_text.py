"""What the report's table says to people: every word of it follows from the report's data."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support import toys
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, hub, kernelize
from twinkle.kernel.registry import get_op
from twinkle.kernel.report import STATES, Report, Row, Tried, plan, report
from twinkle.kernel.report_text import LEGEND, legend, losers, notes
from twinkle.kernel.undo import unkernelize
from twinkle.reasons import Reason

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
NORM, MLP, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3MLP.forward", f"{QWEN3}.apply_rotary_pos_emb"
WIDTHS = (30, 50, 80, 200)


def choice(op: str, *backends: str) -> KernelChoice:
    return KernelChoice(op, backends or ("loopback",))


def text_of(*rows: Row, width: int = 200, **fields: Any) -> str:
    return Report(list(rows), [], **fields).table(width=width)


def row(target: str = "a.b", op: str | None = "op", state: str = "installed", **fields: Any) -> Row:
    return Row(target, op, state, **({"backend": "mine", "instances": 1} if state == "installed" else {}) | fields)


def lost(*reasons: Reason, backend: str = "theirs") -> list[Tried]:
    return [Tried(backend, dict.fromkeys(reasons, 0))]


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_of_a_report() -> None:
    model = presets.build("qwen3")
    kernelize(model, {**DEFAULT_KERNEL_CONFIG, NORM: choice("rms_norm"), toys.ToyNorm: choice("rms_norm")})
    model(**presets.inputs(model))
    made = report(model)
    lines = made.table(width=200).splitlines()
    cells = [line.split() for line in lines]
    assert cells[0] == ["target", "op", "state", "backend", "scope", "sites", "calls", "fallbacks"]
    assert ["qwen3.Qwen3RMSNorm", "rms_norm", "installed", "loopback", "model", "9", "9", "0"] in cells
    assert any(line.startswith("tests.support.toys.ToyNorm") and "unused" in line for line in lines)
    assert any(re.fullmatch(r"\d+ more entries name parts of other models .*", line) for line in lines)
    assert "llama.LlamaRMSNorm" not in made.table() and "llama.LlamaRMSNorm" in made.table(all_rows=True)
    assert str(made) == made.table()
    unkernelize(model)


def test_the_table_of_a_plan_says_what_would_be_and_has_no_calls() -> None:
    made = plan(presets.build("qwen3"), {NORM: choice("rms_norm"), MLP: choice("swiglu", "refuse")})
    header, norm, mlp, *_ = made.table(width=200).splitlines()
    assert header.split() == ["target", "op", "state", "backend", "scope", "sites"]
    assert norm.split() == ["qwen3.Qwen3RMSNorm", "rms_norm", "would", "install", "loopback", "model", "9"]
    assert "refused" in mlp and "would" not in mlp
    assert "installed" not in made.table() and made.rows[0].state == "installed", "the data is as ever"


def test_what_was_verified_is_marked() -> None:
    table = text_of(row("a.b", verified=True), row("a.c"))
    assert table.splitlines()[1].split()[2:4] == ["installed,", "verified"]
    assert table.count("installed,") == 1 and "\nverified: compared with the original" in table


def test_fallbacks_and_compiled_calls_show() -> None:
    served = row()
    served.counts.compiled = True
    served.counts.fallbacks = {"x is on the meta device": 2, "x is too far": 3}
    table = text_of(served)
    assert table.splitlines()[1].split()[-4:] == ["compiled:", "not", "counted", "5"]
    assert "\n  a.b: 2 calls were left to the original: x is on the meta device\n" in table
    assert "\nfallbacks: calls that the kernel can't take" in table
    served.counts.kernel = 7
    assert text_of(served).splitlines()[1].split()[-2:] == ["7", "5"]


def test_errors_show() -> None:
    served = row()
    served.counts.errors = 2
    assert "\n  a.b: the kernel raised in 2 calls\n" in text_of(served)


# --- what nobody has implemented yet ----------------------------------------------------------------------------------


def test_ops_without_a_backend_share_one_line_and_stay_in_the_data(own_registry: None) -> None:
    """Where the default mapping names what nobody has written."""
    del get_op("moe_block").implementations["npu"]
    get_op("sdpa_attention").implementations.clear()
    made = plan(presets.build("qwen3_moe"))
    table = made.table(width=300)
    assert (
        "\nno backend that the chain names exists yet for "
        "moe_block (registered, but not in it: triton, inductor, loopback, refuse), "
        "sdpa_attention (registered, but not in it: inductor, loopback, refuse)\n"
    ) in table
    assert not any(line.startswith(("sdpa", "qwen3_moe.Qwen3MoeSparse")) for line in table.splitlines())
    assert "sdpa" in {found["target"] for found in made.to_dict()["rows"]}
    every = made.table(all_rows=True, width=200)
    assert "exists yet" not in every and re.search(r"^sdpa +sdpa_attention +kept", every, re.MULTILINE)


def test_an_entry_of_somebodys_own_is_shown_with_the_backends_it_could_name() -> None:
    table = plan(presets.build("qwen3"), {MLP: choice("swiglu", "torch", "lopback")}).table(width=200)
    assert re.search(r"^qwen3.Qwen3MLP.forward +swiglu +kept", table, re.MULTILINE)
    assert "  torch for swiglu: not registered (registered: npu, triton, liger, inductor, loopback, refuse)\n" in table
    assert "  lopback for swiglu: not registered (did you mean 'loopback'?)\n" in table


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_each_reason_has_a_line_of_its_own() -> None:
    reasons = [Reason("refused", "too wide"), Reason("refused", "too long", "cut it")]
    served = row(tried=lost(*reasons), notes=["from somewhere", "replaced since"])
    assert "|" not in text_of(served)
    assert text_of(served).splitlines()[3:10] == [
        "Why not more",
        "  theirs for op: too wide",
        "  theirs for op: too long (cut it)",
        "",
        "Notes",
        "  a.b: from somewhere",
        "  a.b: replaced since",
    ]


def test_a_hub_kernels_reason_and_origin_are_two_lines() -> None:
    made = plan(presets.build("qwen3"), {NORM: hub("nobody/nothing", "Norm", version=1)})
    assert "\n  qwen3.Qwen3RMSNorm: from nobody/nothing:Norm (version 1)\n" in made.table(width=200)


def test_a_reason_of_several_rows_is_told_once_for_the_op_or_for_the_targets_it_holds_for() -> None:
    away, wide = Reason("not-available", "no such chip"), Reason("refused", "too wide")
    rows = [
        row("a.One", "norm", "refused", tried=[*lost(away), *lost(wide, backend="other")]),
        row("a.Two", "norm", "kept", tried=[*lost(away), *lost(backend="other")]),
        row("a.Three", "mlp", "kept", tried=lost(away)),
    ]
    data = Report(rows, []).to_dict()["rows"]
    assert losers(data) == [("theirs", "norm, mlp", "no such chip"), ("other", "a.One", "too wide")]
    assert notes(data) == []


def test_the_candidates_that_have_no_name_get_one() -> None:
    rows = [
        row(
            "a.b",
            None,
            "refused",
            tried=[*lost(Reason("own", "x"), backend="any"), *lost(Reason("k", "y"), backend="custom")],
        )
    ]
    assert [line[:2] for line in losers(Report(rows, []).to_dict()["rows"])] == [
        ("any backend", "a.b"),
        ("your own code", "a.b"),
    ]


# --- nothing to show --------------------------------------------------------------------------------------------------


def test_nothing_is_said_too() -> None:
    table = plan(presets.build("qwen3", num_hidden_layers=1), {}).table(width=200)
    assert table.startswith("The mapping has no entries.\n\nNot covered by any entry\n")
    toy = nn.Sequential(nn.Linear(2, 2))
    assert plan(toy, {NORM: DEFAULT_KERNEL_CONFIG[NORM]}).table(width=200) == (
        "No entry of the mapping concerns this model.\n"
        "1 more entry names parts of other models (table(all_rows=True) lists them)"
    )


# --- the legend -------------------------------------------------------------------------------------------------------


def test_the_legend_explains_the_words_of_the_table_and_no_others() -> None:
    def words(*rows: Row) -> list[str]:
        return [line.partition(":")[0] for line in legend(Report(list(rows), []).to_dict()["rows"])]

    assert words() == []
    assert words(row()) == ["sites"]
    assert words(row(scope="process"), row("a.c", state="kept")) == ["kept", "process", "sites"]
    assert set(words(*(row(state=state) for state in STATES))) == {*STATES, "sites"} - {"installed"}
    told = row(verified=True, scope="process")
    told.counts.fall_back("no")
    everything = [told, *(row(state=state) for state in STATES)]
    assert words(*everything) == list(LEGEND), "nothing is explained that can't occur"
    assert text_of(*everything).splitlines()[-len(LEGEND) :] == [f"{word}: {text}" for word, text in LEGEND.items()]


# --- widths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl"])
def test_lines_are_as_long_as_asked_for_and_no_name_is_broken(name: str, width: int) -> None:
    model = presets.build(name)
    tables = [plan(model).table(width=width)]
    kernelize(model)
    tables += [report(model).table(width=width), report(model).table(all_rows=True, width=width)]
    unkernelize(model)
    tables.append(report(toys.toy()).table(width=width))
    for table in tables:
        long = [line for line in table.splitlines() if len(line) > width and len(line.split()) > 1]
        code = [line for line in long if "KernelChoice(" in line]  # to copy: broken at its colon only
        assert [line for line in long if line not in code] == []
    for found in plan(model).rows:
        if found.state in ("installed", "refused"):
            assert found.target.rpartition(".")[2] in tables[0]


def test_a_config_line_too_long_for_a_line_is_still_python() -> None:
    part = next(part for part in plan(toys.toy()).uncovered if part.op == "rms_norm")
    narrow = plan(toys.toy()).table(width=60)
    (lines,) = re.findall(r'^ +"tests\.support\.toys\.ToyNorm":\n +KernelChoice\(.*\),$', narrow, re.MULTILINE)
    scope = {"KernelChoice": KernelChoice}
    assert eval(f"{{{lines}}}", scope) == eval(f"{{{part.config_line}}}", scope)


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(presets.build("qwen3_moe"))
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert made.table() == made.table(width=width)


def test_an_installer_that_does_not_say_how_many_shows_a_question_mark() -> None:
    assert text_of(row(instances=None)).splitlines()[1].split()[5] == "?"
