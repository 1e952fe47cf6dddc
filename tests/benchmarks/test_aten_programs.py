"""The programs about ATen operators: what they print and write, in toy sizes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from benchmarks import aten, routes
from tests.support.results import check_schema
from twinkle.layout import plain

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
