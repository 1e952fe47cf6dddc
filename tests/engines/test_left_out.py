"""Operators of a package that is broken, among all of those that an engine's processes ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import Carry
from twinkle.aten import RegistrationError, catalog
from twinkle.aten.registration import active
from twinkle.engines.merged import merged
from twinkle.reasons import Reason


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of somebody else's, whose operators can't be had."""
    folder = tmp_path / "site"
    (folder / "theirs-1.0.dist-info").mkdir(parents=True)
    (folder / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    text = "[twinkle.aten_ops]\ngelu = no_such_package.gelu:SPEC\n"
    (folder / "theirs-1.0.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("broken_package")
def test_of_all_a_broken_package_takes_no_other_along_and_is_told(
    carry_out: Carry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carried = carry_out(OPS="all", PLATFORM="cpu", REPORT_DIR=tmp_path / "reports")
    assert carried.error is None and carried.installation is not None
    assert "clone" in carried.installation.registrations and list(carried.installation.left_out) == ["gelu"]
    assert "the operator gelu was left out: no_such_package.gelu can't be had" in caplog.text
    facts = merged(tmp_path / "reports")
    (problem,) = facts["problems"]
    assert "gelu was left out: no_such_package.gelu can't be had" in problem
    assert list(facts["processes"][0]["left_out"]) == ["gelu"] and "clone" in facts["operators"]


@pytest.mark.usefixtures("broken_package")
def test_where_an_error_is_to_stop_the_process_a_broken_package_does(carry_out: Carry) -> None:
    with pytest.raises(RegistrationError, match="gelu: no_such_package.gelu can't be had"):
        carry_out(OPS="all", PLATFORM="cpu", ON_ERROR="stop")
    assert active() == []


def test_where_none_of_all_can_be_had_that_is_an_error(carry_out: Carry, monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(name: str) -> Any:
        raise RegistrationError(name, Reason("foreign-ops", "it is somebody else's"))

    monkeypatch.setattr(catalog, "operator", operator)
    assert "it is somebody else's" in str(carry_out(OPS="all", PLATFORM="cpu").error)
