"""Result files in tests: what each must look like, and rows with made-up figures."""

from __future__ import annotations

from typing import Any

from twinkle.bench.results import FIGURES, SCHEMA, Result


def check_schema(content: dict[str, Any]) -> None:
    """A result file's content keeps to the layout."""
    of_model = {"conclusions"} if content["run"]["program"] == "model" else set()
    of_training = {"curves"} if content["run"]["program"] == "training" else set()
    assert content.keys() == {"schema", "run", "results"} | of_model | of_training
    assert content["schema"] == SCHEMA
    run = content["run"]
    assert run.keys() == {
        "id", "program", "device", "device_type", "threads", "versions", "ceilings", "settings"
    }  # fmt: skip
    assert run["id"].startswith(f"{run['program']}-20")
    assert run["versions"].keys() == {"python", "torch", "triton", "transformers", "liger"}
    assert content["results"]
    for row in content["results"]:
        assert row.keys() == {
            "case", "who", "shape", "dtype", "ms", "host_us", "samples", "chosen", "figures", "note"
        }  # fmt: skip
        assert row["figures"].keys() <= FIGURES.keys()
        if row["ms"] is None:
            assert row["note"] and not row["samples"] and not row["host_us"], row
            continue
        assert row["samples"] >= 2
        for times in filter(None, (row["ms"], row["host_us"])):
            assert times.keys() == {"p20", "p50", "p80"}
            assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    keys = [(r["case"], r["who"], r["shape"], r["dtype"]) for r in content["results"]]
    assert len(set(keys)) == len(keys)


def row(who: str, ms: float, case: str = "rotary/llama/f", dtype: str = "float32", **fields: Any) -> Result:
    """A row whose samples all took equally long."""
    times = dict.fromkeys(("p20", "p50", "p80"), ms)
    return Result(case, who, "9x9", dtype, ms=times, samples=3, **fields)
