"""The programs about ATen operators: what they print and write, in toy sizes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from benchmarks import aten, aten_model, routes, sweep
from tests.support.results import check_schema
from twinkle.aten import catalog
from twinkle.bench import routes as measuring
from twinkle.bench.results import Result, Run, read
from twinkle.layout import plain
from twinkle.platforms import platform_of

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu"]


def test_a_report_shows_what_calls_cost_on_the_host_where_that_is_another_time():
    run = aten.main([*QUICK, "--op", "clone"])
    assert "of the host" not in plain(aten.report(run, 200))
    host = dict.fromkeys(("p20", "p50", "p80"), 1234.0)
    run.results = [dataclasses.replace(row, host_us=host) if row.ms else row for row in run.results]
    text = plain(aten.report(run, 200))
    timed = [row for row in run.results if row.ms]
    assert text.partition("of the host")[2].count("1234") == len(timed)


def test_routes_quick(tmp_path, capsys):
    """It runs, and doesn't write into the shipped table what was measured in toy sizes."""
    before = routes.TABLE.read_text()
    run = routes.main(["--quick", "--op", "dropout", "--seconds", "0", "--json", str(tmp_path / "routes.json")])
    check_schema(json.loads((tmp_path / "routes.json").read_text()))
    assert {row.who for row in run.results} == {"native", "torch"}
    assert "dropout" in run.settings["table"]["cpu"]["-"]
    assert re.search(r"dropout +any +(never|from \d+ bytes on)", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        routes.main(["--quick", "--op", "dropout", "--write"])
    assert "--write is for compiled kernels in their real sizes" in capsys.readouterr().err
    assert routes.TABLE.read_text() == before


def test_aten_quick(tmp_path, capsys):
    path = tmp_path / "aten.json"
    run = aten.main([*QUICK, "--op", "clone", "--op", "copy_", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    rows = {(r.case, r.dtype): r for r in read(path).results if r.who == "torch"}
    assert rows["aten/clone/transposed", "float32"].ms and rows["aten/clone/transposed", "float32"].shape == "33x50"
    assert rows["aten/copy_/from float32", "bfloat16"].note == "native serves it: cast"
    assert {r.who for r in run.results if r.ms} == {"native", "torch", "torch, direct"}
    assert {r.note for r in run.results if r.who == "flag_gems"} == {"the package flag_gems is not installed"}
    printed = capsys.readouterr().out
    assert "clone/transposed" in printed and "faster than native by more than the noise: " in printed


def test_the_sweep_of_installed_operators_quick(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    run = sweep.main([*QUICK, "--op", "contiguous", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    kinds = {row.case.split("/")[2] for row in run.results}
    assert kinds == set(catalog.operator("contiguous").work.samples) and {row.who for row in run.results} == {
        "native",
        "installed",
    }
    assert {row.dtype for row in run.results} == {str(dtype).removeprefix("torch.") for dtype in sweep.DTYPES}
    assert f"Of {len(run.results) // 2} calls" in capsys.readouterr().out


def test_what_is_slower_than_it_may_be():
    point = measuring.Point("clone", "gaps", "bfloat16", 64, 100.0, 113.0)
    assert not point.slower and point._replace(installed_us=113.1).slower
    run = Run("sweep", CPU, {}, {})
    for who, ms in (("native", 0.1), ("installed", 0.2)):
        run.results.append(Result("sweep/clone/gaps", who, "64", "bfloat16", ms={"p20": ms, "p50": ms, "p80": ms}))
    assert measuring.points(run.results) == [point._replace(installed_us=200.0)]
    said = sweep.report(run)
    assert said.startswith("Of 1 calls 1 take more than 5% and 8 us longer") and "200.0" in said


@pytest.mark.parametrize(("operator", "dtype"), [("contiguous", torch.bfloat16), ("type_as", torch.int64)])
def test_what_seems_to_be_slower_is_measured_again(operator, dtype):
    platform = platform_of("cpu")
    run = Run("sweep", CPU, {}, {})
    settings = {"rounds": 3, "seconds": 0.01}
    of = {"kinds": ("gaps", "broadcast"), "dtypes": [dtype], "routed": True}
    run.results += measuring.sweep(catalog.operator(operator), platform, (2**10,), **of, **settings)
    assert [(row.case, row.who) for row in run.results[2:]] == [
        (f"sweep/{operator}/broadcast", "native"),
        (f"sweep/{operator}/broadcast", "installed"),
    ]
    for place, ms in ((1, 0.0), (3, 1e3)):
        run.results[place] = dataclasses.replace(run.results[place], ms={"p20": ms, "p50": ms, "p80": ms})
    sweep.look_again(run, platform, **settings)
    assert [bool(row.note) for row in run.results] == [False, False, True, True]
    assert run.results[3].ms["p80"] < 1e3 and run.results[3].samples == sweep.LONGER * 3


def test_a_model_with_installed_operators_quick(tmp_path):
    path = tmp_path / "aten_model.json"
    run = aten_model.main([*QUICK, "--steps", "2", "--generations", "4", "--json", str(path)])
    check_schema(json.loads(path.read_text()))
    rows = {(row.case, row.who): row for row in run.results}
    assert len(rows) == 6 and not rows["aten_model/train", "native"].note
    assert "embedding 1 (1 by its kernel)" in rows["aten_model/train", "all"].note
    assert "embedding 4 (4 by its kernel)" in rows["aten_model/generate", "all"].note
    assert [rows["aten_model/generate", who].samples for who in ("native", "auto", "all")] == [4, 4, 3]
