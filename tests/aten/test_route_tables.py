"""The table of routes as it is made: from measurements to the bytes from which on a kernel serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.aten.conftest import ROOT, SIMULATED
from twinkle.aten import Profile, catalog, routes
from twinkle.aten.spec import OperatorSpec
from twinkle.bench import routes as table_of
from twinkle.bench.aten import NATIVE
from twinkle.bench.results import Result, read


def timed(size: int, who: str, us: float, host_us: float | None = None) -> Result:
    ms = dict.fromkeys(("p20", "p50", "p80"), us / 1000.0)
    host = None if host_us is None else dict.fromkeys(ms, host_us)
    return Result("routes/clone/gaps", who, str(size), "bfloat16", ms=ms, samples=3, host_us=host)


@pytest.mark.parametrize(
    ("times", "least"),
    [
        ([(9, 1), (9, 9), (9, 10)], 64),
        ([(9, 10), (9, 8), (9, 10)], 64),
        ([(9, 8), (9, 10), (9, 10)], 16),
        ([(9, 10), (9, 10), (9, 10)], 4),
        ([(9, 10), (9, 10), (9, 9)], None),
        ([(9, 10), (9, 10), (98, 100)], None),  # so little may be lost in another dtype
        ([], None),
    ],
)
def test_a_kernel_serves_from_where_it_is_faster_at_every_size(times: list[tuple[float, float]], least: Any) -> None:
    rows = [timed(4, "triton", 1)] if not times else []
    for size, (ours, native) in zip((4, 16, 64), times, strict=False):
        rows += [timed(size, "triton", ours), timed(size, NATIVE, native)]
    assert table_of.tables(rows) == {"clone": {"gaps": least}}


def test_a_call_takes_as_long_as_device_or_host() -> None:
    rows = [timed(4, "triton", 1, 30), timed(4, NATIVE, 20, 3), timed(16, "triton", 2, 30), timed(16, NATIVE, 80, 3)]
    assert table_of.tables(rows) == {"clone": {"gaps": 16}}


def test_every_kind_is_measured_in_every_size(chip: Profile) -> None:
    if SIMULATED:
        pytest.skip("it has no events")
    spec = catalog.operator("copy_")
    rows = list(table_of.sweep(spec, chip.found, (2**12, 2**13), rounds=3, seconds=0.0))
    assert {row.case.split("/")[2] for row in rows} == set(spec.work.samples)
    assert {row.shape for row in rows} == {"4096", "8192"}
    # Not all are taken by the kernel made of other operators.
    assert {row.note for row in rows if not row.ms} <= {"native serves it: cast"}
    assert set(table_of.tables(rows)["copy_"]) == set(spec.work.samples)


def test_every_kind_has_a_call_of_each_size_that_the_table_is_made_of(registrable: OperatorSpec) -> None:
    work = registrable.work
    for kind, sample in work.samples.items():
        dtype = table_of._first_that_makes(kind, work)
        for size in table_of.SIZES:
            values = sample(size // dtype.itemsize, torch.device("meta"), dtype)
            assert work.kind(*values) == kind and 1 / 2 <= work.size(*values) / size <= 2


def test_a_size_in_which_a_kind_has_no_call_is_left_out(chip: Profile) -> None:
    """No row of a table is as short as that, and a longer one would be timed under a wrong name."""
    if SIMULATED:
        pytest.skip("it has no events")
    spec = catalog.operator("embedding")
    rows = list(table_of.sweep(spec, chip.found, (2**6, 2**10), rounds=3, seconds=0.0))
    found = {(row.case.split("/")[2], row.shape) for row in rows}
    assert found == {("short rows", "1024"), ("rows of 2 KB", "1024"), ("uneven rows", "1024")}


def test_the_shipped_table_is_as_it_is_written(tmp_path: Path) -> None:
    shipped = Path(routes.__file__).with_name("routes.json")
    assert table_of.text_of(routes.table()) == shipped.read_text()
    copy = tmp_path / "routes.json"
    copy.write_text(shipped.read_text())
    table_of.write(copy, "nvidia", "sm_1", {"clone": {"gaps": None}})
    table_of.write(copy, "amd", "gfx", {"clone": {"gaps": 4}})
    table_of.write(copy, "nvidia", "sm_1", {"silu": {"any": 4}})
    written = json.loads(copy.read_text())
    assert written["nvidia"].pop("sm_1") == {"clone": {"gaps": None}, "silu": {"any": 4}}
    assert written.pop("amd") == {"gfx": {"clone": {"gaps": 4}}}
    assert written == routes.table()


def test_the_shipped_table_is_what_the_committed_results_give() -> None:
    found = read(ROOT / "benchmarks" / "results" / "cuda" / "routes.json")
    assert routes.table()["nvidia"]["sm_90"] == table_of.tables(list(found.results))
